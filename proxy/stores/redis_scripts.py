"""What a Redis server does in one step, in its own Lua. KEYS[1] is the prefix of all names.

    PREFIX used               sorted set: rollouts by the time they were last used
    PREFIX rollout:ROLLOUT    hash: what is known of a rollout
    PREFIX turns:ROLLOUT      sorted set, all scores 0: the ids of its turns
    PREFIX rewards:ROLLOUT    hash: turn to reward
    PREFIX turn:TURN          hash: packed turn, its parent, its packed keys
    PREFIX key:KEY            sorted set, all scores 0: the ids of turns
    PREFIX evicted            sorted set: keys by the number of their eviction, which `evictions` counts
    PREFIX answers            sorted set: id and key of answers, by time
    PREFIX answers:KEY        hash: id to packed answer
    PREFIX totals             hash: turns, size, answers (bytes)

Scripts name keys that they find on the way, so this is for one server with its replicas, not for a cluster.
"""

_UNPACK = """
local function unpack_keys(packed)
    local keys, at = {}, 1
    while at <= #packed do
        local length = packed:byte(at)
        keys[#keys + 1] = packed:sub(at + 1, at + length)
        at = at + 1 + length
    end
    return keys
end
"""
"""As `packed.unpack_keys`."""

_REMOVE = (
    _UNPACK
    + """
local p = KEYS[1]
local function bury(keys, limit)
    for _, key in ipairs(keys) do
        redis.call('ZADD', p .. 'evicted', redis.call('INCR', p .. 'evictions'), key)
    end
    redis.call('ZREMRANGEBYRANK', p .. 'evicted', 0, -limit - 1)
end
local function remove(rollout)
    local keys = {}
    local turns = redis.call('ZRANGE', p .. 'turns:' .. rollout, 0, -1)
    for _, turn in ipairs(turns) do
        local packed = redis.call('HGET', p .. 'turn:' .. turn, 'keys')
        for _, key in ipairs(unpack_keys(packed or '')) do
            redis.call('ZREM', p .. 'key:' .. key, turn)
            keys[#keys + 1] = key
        end
        redis.call('UNLINK', p .. 'turn:' .. turn)
    end
    local size = tonumber(redis.call('HGET', p .. 'rollout:' .. rollout, 'size') or 0)
    redis.call('HINCRBY', p .. 'totals', 'turns', 0 - #turns)
    redis.call('HINCRBY', p .. 'totals', 'size', 0 - size)
    redis.call('DEL', p .. 'turns:' .. rollout, p .. 'rollout:' .. rollout, p .. 'rewards:' .. rollout)
    redis.call('ZREM', p .. 'used', rollout)
    return #turns, size, keys
end
"""
)

ADD = (
    _UNPACK
    + """
local p, rollout, now = KEYS[1], ARGV[1], ARGV[2]
local turns, size = 0, 0
for i = 3, #ARGV, 5 do
    local turn, parent, keys, packed, bytes = unpack(ARGV, i, i + 4)
    if redis.call('EXISTS', p .. 'turn:' .. turn) == 0 then
        redis.call('HSET', p .. 'turn:' .. turn, 'parent', parent, 'keys', keys, 'packed', packed)
        redis.call('ZADD', p .. 'turns:' .. rollout, 0, turn)
        for _, key in ipairs(unpack_keys(keys)) do
            redis.call('ZADD', p .. 'key:' .. key, 0, turn)
        end
        turns, size = turns + 1, size + tonumber(bytes)
    end
end
if turns == 0 then
    return 0
end
if not redis.call('ZSCORE', p .. 'used', rollout) then
    local made_up = #rollout == 32 and string.find(rollout, '^[0-9a-f]+0000$')
    redis.call('HSET', p .. 'rollout:' .. rollout, 'explicit', made_up and 0 or 1, 'created', now)
end
redis.call('ZADD', p .. 'used', 'GT', now, rollout)
redis.call('HINCRBY', p .. 'rollout:' .. rollout, 'turns', turns)
redis.call('HINCRBY', p .. 'rollout:' .. rollout, 'size', size)
redis.call('HINCRBY', p .. 'totals', 'turns', turns)
return redis.call('HINCRBY', p .. 'totals', 'size', size)
"""
)
"""rollout, now, and for each turn: id, parent or '', packed keys, packed turn, size.
Returns the bytes of all turns; 0 if nothing was new."""

SHRINK = (
    _REMOVE
    + """
local keep, goal, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local tombstones, batch = ARGV[4], tonumber(ARGV[5])
local left = tonumber(redis.call('HGET', p .. 'totals', 'size') or 0)
local rollouts, turns, size, skipped, keys = 0, 0, 0, 0, {}
local function leave(rollout)
    local n, bytes, its = remove(rollout)
    rollouts, turns, size, left = rollouts + 1, turns + n, size + bytes, left - bytes
    for _, key in ipairs(its) do keys[#keys + 1] = key end
end
while left > goal and turns < batch do
    local rollout = redis.call('ZRANGE', p .. 'used', skipped, skipped)[1]
    if not rollout then
        if left > most and redis.call('EXISTS', p .. 'turns:' .. keep) == 1 then leave(keep) end
        break
    elseif rollout == keep or redis.call('EXISTS', p .. 'turns:' .. rollout) == 0 then
        skipped = skipped + 1
    else
        leave(rollout)
    end
end
bury(keys, tombstones)
return {rollouts, turns, size}
"""
)
"""A rollout to spare or '', bytes to reach, bytes allowed, tombstones, turns in one step.
The rollout to spare goes last, and only if the rest was not enough. Returns how many rollouts, turns and
bytes left the store; none when there is nothing more to do."""

AGE = (
    _REMOVE
    + """
local oldest, tombstones, batch = ARGV[1], ARGV[2], tonumber(ARGV[3])
local rollouts, turns, size, keys = 0, 0, 0, {}
local old = redis.call('ZRANGEBYSCORE', p .. 'used', '-inf', '(' .. oldest, 'LIMIT', 0, batch)
for _, rollout in ipairs(old) do
    if turns >= batch then break end
    local n, bytes, its = remove(rollout)
    rollouts, turns, size = rollouts + 1, turns + n, size + bytes
    for _, key in ipairs(its) do keys[#keys + 1] = key end
end
bury(keys, tombstones)
return {rollouts, turns, size}
"""
)
"""Time before which those last used go, tombstones, turns in one step. Returns as SHRINK."""

DELETE = (
    _REMOVE
    + """
local known = redis.call('ZSCORE', p .. 'used', ARGV[1])
remove(ARGV[1])
return known and 1 or 0
"""
)
"""rollout. Returns whether there was one."""

PATH = """
local found, seen, turn = {}, {}, ARGV[1]
while turn ~= '' do
    local packed, parent = unpack(redis.call('HMGET', KEYS[1] .. 'turn:' .. turn, 'packed', 'parent'))
    if not packed or seen[turn] then
        return {}
    end
    seen[turn] = true
    found[#found + 1] = packed
    turn = parent
end
return found
"""
"""A turn's id. Returns the packed turns, the last first; nothing if one is missing."""

_DROP = (
    _UNPACK
    + """
local p = KEYS[1]
local function drop(member)
    local id, key = unpack(unpack_keys(member))
    redis.call('HINCRBY', p .. 'totals', 'answers', 0 - redis.call('HSTRLEN', p .. 'answers:' .. key, id))
    redis.call('HDEL', p .. 'answers:' .. key, id)
    redis.call('ZREM', p .. 'answers', member)
end
"""
)

ADD_ANSWER = (
    _DROP
    + """
local member, now, packed, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if redis.call('ZADD', p .. 'answers', 'NX', now, member) == 0 then
    return 0
end
local id, key = unpack(unpack_keys(member))
redis.call('HSET', p .. 'answers:' .. key, id, packed)
local left = redis.call('HINCRBY', p .. 'totals', 'answers', #packed)
while left > most do
    drop(redis.call('ZRANGE', p .. 'answers', 0, 0)[1])
    left = tonumber(redis.call('HGET', p .. 'totals', 'answers'))
end
return 1
"""
)
"""Packed id and key, now, packed answer, bytes allowed."""

TAKE_ANSWER = (
    _DROP
    + """
if not redis.call('ZSCORE', p .. 'answers', ARGV[1]) then
    return 0
end
drop(ARGV[1])
return 1
"""
)
"""Packed id and key. Returns whether it was there."""

AGE_ANSWERS = (
    _DROP
    + """
local old = redis.call('ZRANGEBYSCORE', p .. 'answers', '-inf', '(' .. ARGV[1], 'LIMIT', 0, tonumber(ARGV[2]))
for _, member in ipairs(old) do
    drop(member)
end
return #old
"""
)
"""Time before which those kept go, answers in one step. Returns how many went."""
