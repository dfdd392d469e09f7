"""Lua scripts that add, list and remove turns and sessions. Each runs in one step of the server."""

from proxy.stores.redis_functions import FEED, FLAG, INDEX, PARTS, REMOVE, REPLY, REPLY_SESSION, SESSIONS

OPEN = """
local version = redis.call('GET', KEYS[1] .. 'version')
local partitions = redis.call('GET', KEYS[1] .. 'partitions')
if not version and not partitions then
    redis.call('SET', KEYS[1] .. 'version', ARGV[1])
    version = ARGV[1]
end
local memory = redis.pcall('INFO', 'memory')
return {version or '', partitions or '', type(memory) == 'string' and memory or ''}
"""
"""Arguments: version of the keys. Reply: the version that is there; the number of partitions, '' if the data
are not split; what the server tells of its memory, '' if it does not."""

ADD = (
    INDEX
    + SESSIONS
    + FLAG
    + """
local rollout, now = ARGV[1], ARGV[9]
local added, parents, size = 0, {}, 0
for i = 10, #ARGV, 6 do
    local turn, parent, prompt_turn, ambiguous, packed_entries, packed = unpack(ARGV, i, i + 5)
    local name = p .. 'turn:' .. turn
    if redis.call('EXISTS', name) == 0 then
        if redis.call('EXISTS', p .. 'rollout:' .. rollout) == 0 then
            save_session(unpack(ARGV, 1, 8))
        end
        redis.call('HSET', name, 'packed', packed, 'rollout', rollout, 'entries', packed_entries, 'open', 1)
        if parent ~= '' then
            redis.call('HSET', name, 'parent', parent)
            parents[#parents + 1] = parent
        end
        if prompt_turn ~= '' then
            redis.call('HSET', name, 'prompt_turn', prompt_turn)
        end
        redis.call('ZADD', p .. 'turns:' .. rollout, 0, turn)
        if ambiguous == '1' then
            flag(rollout)
        end
        local entries = parts_of(packed_entries)
        for j = 1, #entries, 2 do
            if entries[j + 1] ~= '' and flag_equal(p .. 'key:' .. entries[j], rollout) == 1 then
                flag(rollout)
            end
        end
        for j = 1, #entries, 2 do
            redis.call('ZADD', p .. 'key:' .. entries[j], 0, group_prefix(entries[j + 1]) .. '1' .. turn)
        end
        added, size = added + 1, size + #packed_entries + #packed
    end
end
if added == 0 then
    return 0
end
for _, parent in ipairs(parents) do
    local open, entries = unpack(redis.call('HMGET', p .. 'turn:' .. parent, 'open', 'entries'))
    if open then
        redis.call('HSET', p .. 'turn:' .. parent, 'continued', 1)
        if open == '1' then
            set_open(parent, entries, 0)
        end
    end
end
touch(rollout, now)
redis.call('HINCRBY', p .. 'rollout:' .. rollout, 'turns', added)
redis.call('HINCRBY', p .. 'rollout:' .. rollout, 'size', size)
redis.call('HINCRBY', p .. 'totals', 'turns', added)
return redis.call('HINCRBY', p .. 'totals', 'size', size)
"""
)
"""Arguments: the session (8, see `redis._session_arguments`), now; for each turn its id, parent or '',
prompt_turn or '', 1 if it makes the session ambiguous, packed entries, packed turn.
Reply: bytes held afterwards; 0 if no turn was new."""

SAVE_SESSION = f"{PARTS}{SESSIONS}return save_session(unpack(ARGV))"
"""Arguments: the session. Reply: bytes held afterwards."""

PIN = (
    PARTS
    + SESSIONS
    + """
local rollout, now, pinned_until = ARGV[1], ARGV[2], ARGV[3]
local name = p .. 'rollout:' .. rollout
if redis.call('EXISTS', name) == 1 then
    touch(rollout, now)
    if tonumber(redis.call('HGET', name, 'pinned_until') or 0) < tonumber(pinned_until) then
        redis.call('HSET', name, 'pinned_until', pinned_until)
    end
end
"""
)
"""Arguments: rollout, now, until."""

LIST_SESSIONS = (
    REPLY
    + REPLY_SESSION
    + """
local name, limit, used, id = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
-- not `<`, which depends on the server's locale
local function before(left, right)
    for i = 1, math.min(#left, #right) do
        local a, b = left:byte(i), right:byte(i)
        if a ~= b then
            return a < b
        end
    end
    return #left < #right
end
local first = 0
if used ~= '' then
    first = redis.call('ZCOUNT', name, '(' .. used, '+inf')
    local last = first + redis.call('ZCOUNT', name, used, used)
    while first < last do
        local middle = math.floor((first + last) / 2)
        if before(redis.call('ZREVRANGE', name, middle, middle)[1], id) then
            last = middle
        else
            first = middle + 1
        end
    end
end
local found = redis.call('ZREVRANGE', name, first, first + limit - 1, 'WITHSCORES')
local sessions = {}
for i = 1, #found, 2 do
    reply_session(sessions, found[i], found[i + 1])
end
return table.concat(sessions)
"""
)
"""Arguments: name of a sorted set, limit, `used` and id of the cursor (both '' if there is none).
Reply: for each session what `reply_session` appends."""

STEADY_SINCE = """
local name, now, was_set, tolerance, longest_gap = KEYS[1] .. 'clock', unpack(ARGV)
local seen, steady_since = unpack(redis.call('HMGET', name, 'seen', 'steady_since'))
if seen then
    local gap = tonumber(now) - tonumber(seen)
    if gap < 0 - tolerance or gap > tonumber(longest_gap) then
        was_set = '1'
    end
end
if was_set == '1' then
    steady_since = now
end
redis.call('HSET', name, 'seen', now, 'steady_since', steady_since or '0')
return steady_since or '0'
"""
"""As `AgeClock.next_record`. Arguments: now, 1 if the clock was set, tolerance, longest gap.
Reply: since when the clock has been steady."""

EVICT = (
    REMOVE
    + """
local own, target, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local oldest, now, limit, step = tonumber(ARGV[4]), tonumber(ARGV[5]), ARGV[6], tonumber(ARGV[7])
local left = tonumber(redis.call('HGET', p .. 'totals', 'size') or 0)
local rollouts, turns, size, missed, keys = 0, 0, 0, 0, {}
local function pinned(rollout)
    return tonumber(redis.call('HGET', p .. 'rollout:' .. rollout, 'pinned_until') or 0) > now
end
local function evict(rollout)
    missed = missed + undelivered(rollout)
    local removed, bytes = remove(rollout, keys)
    rollouts, turns, size, left = rollouts + 1, turns + removed, size + bytes, left - bytes
end
if left <= most then
    target = left
end
local skipped = 0
while rollouts + turns < step do
    local rollout, used = unpack(redis.call('ZRANGE', p .. 'used', skipped, skipped, 'WITHSCORES'))
    if not rollout or (left <= target and tonumber(used) >= oldest) then
        break
    end
    if rollout == own or pinned(rollout) then
        skipped = skipped + 1
    else
        evict(rollout)
    end
end
if rollouts == 0 and own ~= '' and not pinned(own) then
    local bytes = tonumber(redis.call('HGET', p .. 'rollout:' .. own, 'size') or 0)
    if bytes > most then
        evict(own)
    end
end
remember_evicted(keys, limit)
return {rollouts, turns, size, missed}
"""
)
"""Arguments: a rollout to evict last or '', bytes to reach, bytes allowed, time before which a last use is
too old, now, number of evicted keys to remember, rollouts and turns to evict in one step.
Reply: numbers of evicted rollouts, of their turns and bytes, and of those rollouts that were finished and not
acknowledged by every consumer; all 0 if there was nothing to evict."""

DELETE = (
    REMOVE
    + """
if redis.call('EXISTS', p .. 'rollout:' .. ARGV[1]) == 0 then
    return 0
end
remove(ARGV[1], {})
return 1
"""
)
"""Arguments: rollout. Reply: 1 if there was one."""

SET_REWARDS = (
    PARTS
    + FEED
    + """
local rollout, now, step, whole, changed = ARGV[1], ARGV[2], ARGV[3], false, false
if redis.call('EXISTS', p .. 'rollout:' .. rollout) == 0 then
    return 0
end
for i = 4, #ARGV, 2 do
    local before = redis.call('HGET', p .. 'rewards:' .. rollout, ARGV[i])
    whole, changed = whole or ARGV[i] == '', changed or before ~= ARGV[i + 1]
    redis.call('HSET', p .. 'rewards:' .. rollout, ARGV[i], ARGV[i + 1])
end
if #ARGV > 3 then
    finish(rollout, 'reward', now, step, changed, not whole)
end
return 1
"""
)
"""Arguments: rollout, now and step (see `finish`); for each reward turn and value. Reply: 1 if there is such
a rollout."""

PATH = """
local found, seen, turn, holders = {}, {}, ARGV[1], {}
while turn do
    local fields = redis.call('HMGET', KEYS[1] .. 'turn:' .. turn, 'packed', 'parent', 'prompt_turn')
    if not fields[1] or seen[turn] then
        return {}
    end
    seen[turn] = true
    found[#found + 1] = fields[1]
    holders[#holders + 1] = fields[3] or nil
    turn = fields[2]
end
for _, holder in ipairs(holders) do
    if not seen[holder] then
        found[#found + 1] = redis.call('HGET', KEYS[1] .. 'turn:' .. holder, 'packed') or nil
    end
end
return found
"""
"""Arguments: turn. Reply: the packed turns of its path and those that hold prompts for them, in any order;
nothing if a turn of the path is missing."""

NEWEST = "return redis.call('ZREVRANGE', KEYS[1] .. 'turns:' .. ARGV[1], 0, ARGV[2] - 1)"
"""Arguments: rollout, limit or 0 for none. Reply: turns, the newest first."""

SESSION = (
    REPLY
    + REPLY_SESSION
    + """
local used, session = redis.call('ZSCORE', KEYS[1] .. 'used', ARGV[1]), {}
if used then
    reply_session(session, ARGV[1], used)
end
return table.concat(session)
"""
)
"""Arguments: rollout. Reply: what `reply_session` appends, if there is one."""

FIELDS = "return redis.call('HGETALL', KEYS[1] .. ARGV[1])"
"""Arguments: name of a hash without the prefix. Reply: field, value, field, ..."""

CHANGE_REPLICA = """
local name = KEYS[1] .. 'replicas:' .. ARGV[1]
if ARGV[3] then
    redis.call('HSET', name, ARGV[2], ARGV[3])
else
    redis.call('HDEL', name, ARGV[2])
end
"""
"""Arguments: fleet, URL, change or none."""

SECRET = """
local secret = redis.call('GET', KEYS[1] .. 'secret')
if not secret then
    redis.call('SET', KEYS[1] .. 'secret', ARGV[1])
end
return secret or ARGV[1]
"""
"""Arguments: a secret. Reply: the one that was there first."""

USAGE = """
local turns, size = unpack(redis.call('HMGET', KEYS[1] .. 'totals', 'turns', 'size'))
return {redis.call('ZCARD', KEYS[1] .. 'used'), turns or '0', size or '0'}
"""
"""Reply: rollouts, turns, bytes."""

TIME = "return redis.call('TIME')"
"""Reply: seconds and microseconds of the server's clock."""
