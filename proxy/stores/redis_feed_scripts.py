"""Lua scripts of the feed.

Each runs in one step of the server, so positions become visible in their order.
"""

from proxy.stores.redis_functions import FEED, PARTS, REPLY, REPLY_SESSION

FINISH = f"{PARTS}{FEED}return finish(unpack(ARGV))"
"""Arguments: rollout, cause, now, step (see `finish`). Reply: 1 if it was put at the end."""

FINISH_IDLE = (
    PARTS
    + FEED
    + """
local before, limit, now, step = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
local used = redis.call('HGET', p .. 'feed_state', 'idle_used')
local low = used and '(' .. used or '-inf'
local found = redis.call('ZRANGEBYSCORE', p .. 'used', low, '(' .. before, 'WITHSCORES', 'LIMIT', 0, limit)
if #found == 0 then
    return 0
end
local last = found[#found]
for i = 1, #found, 2 do
    finish(found[i], 'idle', now, step)
end
if #found == 2 * limit then
    -- also rollouts used at the same time as the last of them: the next call starts after that time
    for _, rollout in ipairs(redis.call('ZRANGEBYSCORE', p .. 'used', last, last)) do
        finish(rollout, 'idle', now, step)
    end
end
redis.call('HSET', p .. 'feed_state', 'idle_used', last)
return #found / 2
"""
)
"""Arguments: time before which the last use was, limit, now, step (see `finish`).
Reply: number of rollouts that were looked at."""

_RAISE = """
local function raise(horizon)
    local last = redis.call('HGET', KEYS[1] .. 'feed_state', 'last') or '0'
    if tonumber(horizon) > tonumber(last) then
        redis.call('HSET', KEYS[1] .. 'feed_state', 'last', horizon)
        return horizon
    end
    return last
end
"""
"""`raise` sees to it that positions given from now on are after one, and returns the last position."""

READ = (
    PARTS
    + REPLY
    + REPLY_SESSION
    + _RAISE
    + """
local name, after, limit, horizon = ARGV[1], ARGV[2], ARGV[3], ARGV[4]
if horizon ~= '+inf' then
    raise(horizon)
end
local found = redis.call('ZRANGEBYSCORE', name, '(' .. after, horizon, 'WITHSCORES', 'LIMIT', 0, limit)
local entries = {}
for i = 1, #found, 2 do
    local used = redis.call('ZSCORE', p .. 'used', found[i])
    local revision, cause = unpack(redis.call('HMGET', p .. 'rollout:' .. found[i], 'revision', 'cause'))
    if used and revision then
        reply(entries, found[i + 1], revision, cause)
        reply_session(entries, found[i], used)
    end
end
return table.concat(entries)
"""
)
"""Arguments: name of a sorted set, position, limit, last position to read or '+inf'.
Reply: for each finished rollout its position, revision, cause, and what `reply_session` appends."""

END = f"{_RAISE}return raise(ARGV[1])"
"""Arguments: a position that those given from now on are after, or 0. Reply: the last position."""

ACKNOWLEDGED = """
local p, consumer = KEYS[1], ARGV[1]
return {redis.call('HGET', p .. 'consumers', consumer), redis.call('ZSCORE', p .. 'consumers_at', consumer)}
"""
"""Arguments: consumer. Reply: its position and when it was written, both nil if there is no such consumer."""

ACKNOWLEDGE = """
local p, consumer = KEYS[1], ARGV[1]
local last = tonumber(redis.call('HGET', p .. 'feed_state', 'last') or 0)
local before = tonumber(redis.call('HGET', p .. 'consumers', consumer) or 0)
last = math.max(last, tonumber(ARGV[4]))
local position = string.format('%.0f', math.max(before, math.min(tonumber(ARGV[2]), last)))
redis.call('HSET', p .. 'consumers', consumer, position)
redis.call('ZADD', p .. 'consumers_at', ARGV[3], consumer)
return position
"""
"""Arguments: consumer, position, now in seconds, the least that counts as the end.
Reply: the position that is acknowledged now."""

FORGET = """
redis.call('ZREM', KEYS[1] .. 'consumers_at', ARGV[1])
return redis.call('HDEL', KEYS[1] .. 'consumers', ARGV[1])
"""
"""Arguments: consumer. Reply: 1 if there was such a consumer."""

FORGET_OLD = """
local old = redis.call('ZRANGEBYSCORE', KEYS[1] .. 'consumers_at', '-inf', '(' .. ARGV[1])
for _, consumer in ipairs(old) do
    redis.call('HDEL', KEYS[1] .. 'consumers', consumer)
    redis.call('ZREM', KEYS[1] .. 'consumers_at', consumer)
end
"""
"""Arguments: time before which they were last written."""

CONSUMERS = (
    PARTS
    + REPLY
    + """
local found, consumers = {}, redis.call('HGETALL', p .. 'consumers')
for i = 1, #consumers, 2 do
    local consumer, position = consumers[i], consumers[i + 1]
    local tenant = consumer:match('^(.*)/')
    if not ARGV[1] or ARGV[1] == tenant then
        local name, low = p .. 'feed:' .. tenant, '(' .. position
        local oldest = redis.call('ZRANGEBYSCORE', name, low, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
        reply(found, consumer, position, redis.call('ZCOUNT', name, low, '+inf'), oldest or 0)
    end
end
return table.concat(found)
"""
)
"""Arguments: tenant, or none for all. Reply: for each consumer its name, position, and of the rollouts after
it their number and the position of the first."""
