"""What a Redis store keeps on the servers, and its Lua scripts. Each runs in one step of one server.

    tokenproxy:version             of all this
    tokenproxy:key:KEY             sorted set, all scores 0: the turns under a key of the index, as members
    tokenproxy:turn:TURN           string: the rollout of a turn
    tokenproxy:{s/ROLLOUT}:turns   hash: turn to packed turn
    tokenproxy:{s/ROLLOUT}:entries hash: turn to its parent, prompt_turn and index entries, as `pack_parts`
    tokenproxy:{s/ROLLOUT}:state   hash: turn to `claimed` or `continued`; `bytes`: of its turns
    tokenproxy:{v/SPACE}:values    hash: name to packed value
    tokenproxy:{v/SPACE}:expiry    sorted set: names by the time when they expire
    tokenproxy:{v/SPACE}:bytes     string: bytes of the values

The list of sessions and the feed are in one slot, under `tokenproxy:{sessions}:`

    used             sorted set: rollouts by the time of their last use
    used:TENANT      sorted set: the same for one tenant
    rollout:ROLLOUT  hash: the session without its id and `used`, pinned_until, `bytes` of its turns; of a
                     finished rollout also revision, cause, and finished_turns: their number at that time
    rewards:ROLLOUT  hash: turn to reward
    feed             sorted set: finished rollouts by their position
    feed:TENANT      sorted set: the same for one tenant
    state            hash: last (position of the feed), idle_used (of the last rollout that was looked at)
    clock            hash: seen, steady_since; see `eviction.ClockRecord`
    totals           hash: turns, size
    removed          set: rollouts that were removed from the list, and whose turns are still to be removed

A member of the index is `ids`, turn and rollout, each of the first two after a byte with its length: members
of a group are neighbours, from the oldest to the newest. Turn and rollout are empty in the one member that
stands for all evicted turns of its group.

Scripts of the list get two keys, its prefix and one under which nothing is stored, and compute the names that
they use. That matters while a cluster moves the slot to another server: part of the keys is on each, and a
command with several keys that are on neither is refused (`TRYAGAIN`) until the slot has moved.
"""

from tokenproxy.record.store import FOUND_AT_MOST

PREFIX = b"tokenproxy:"
SESSIONS = PREFIX + b"{sessions}:"

OPEN = """
local memory = redis.pcall('INFO', 'memory')
local version = redis.call('GET', KEYS[1])
if not version then
    redis.call('SET', KEYS[1], ARGV[1])
end
return {version or ARGV[1], type(memory) == 'string' and memory or ''}
"""
"""Arguments: version of the keys. Reply: the one that is there; what the server tells of its memory."""

INDEX = """
for i, name in ipairs(KEYS) do
    redis.call('ZADD', name, 0, ARGV[i])
    redis.call('PERSIST', name)
end
"""
"""Keys: of the index. Arguments: a member for each."""

UNINDEX = """
for i, name in ipairs(KEYS) do
    local member, ids = ARGV[i + 1], ARGV[i + 1]:byte(1) + 1
    redis.call('ZREM', name, member)
    if ARGV[1] ~= '0' then
        redis.call('ZADD', name, 0, member:sub(1, ids) .. string.char(0))
    end
    local live = redis.call('ZCARD', name) > 32
    for _, other in ipairs(redis.call('ZRANGE', name, 0, 31)) do
        live = live or #other > other:byte(1) + 2
    end
    if not live and ARGV[1] ~= '0' then
        redis.call('EXPIRE', name, ARGV[1])
    end
end
"""
"""Keys: of the index. Arguments: seconds for which evicted turns are remembered, 0 for deleted ones; a member
for each key."""

_REPLY = """
local function reply(to, ...)
    for _, value in ipairs({...}) do
        value = tostring(value)
        to[#to + 1] = #value .. ':' .. value
    end
end
"""
"""`reply` appends values to a list, each after its length: `5:hello`. A client reads one long string much
faster than nested lists."""

FIND = (
    _REPLY
    + f"local most = {FOUND_AT_MOST}"
    + """
local found = {}
for i, name in ipairs(KEYS) do
    local total = redis.call('ZCARD', name)
    if total > 0 then
        local members, groups, high = redis.call('ZREVRANGE', name, 0, most - 1), {}, '+'
        if total <= most then
            groups[1] = {total, members}
        end
        while total > most and #groups < most do
            local last = redis.call('ZREVRANGEBYLEX', name, high, '-', 'LIMIT', 0, 1)[1]
            if not last then
                break
            end
            local ids = last:sub(1, last:byte(1) + 1)
            local from, to = '[' .. ids, '(' .. ids .. '\\255'
            members = redis.call('ZREVRANGEBYLEX', name, to, from, 'LIMIT', 0, most)
            groups[#groups + 1] = {redis.call('ZLEXCOUNT', name, from, to), members}
            high = '(' .. ids
        end
        reply(found, i - 1, total, #groups)
        for _, group in ipairs(groups) do
            reply(found, group[1], #group[2], unpack(group[2]))
        end
    end
end
return table.concat(found)
"""
)
"""Keys: of the index. Reply: for each that holds something its number (from 0), the numbers of members and of
groups; for each group its number of members and those that are listed, the newest first. If all members are
listed, they are one group, whatever their ids."""

ADD = """
for i = 1, #ARGV, 4 do
    local turn, parent, entries, packed = unpack(ARGV, i, i + 3)
    if redis.call('HSETNX', KEYS[1], turn, packed) == 1 then
        redis.call('HSET', KEYS[2], turn, entries)
        redis.call('HINCRBY', KEYS[3], 'bytes', #entries + #packed)
        if parent ~= '' then
            redis.call('HSET', KEYS[3], parent, 'continued')
        end
    end
end
return {redis.call('HLEN', KEYS[1]), tonumber(redis.call('HGET', KEYS[3], 'bytes'))}
"""
"""Keys: turns, entries and state of a rollout. Arguments: for each turn its id, parent or '', entries, packed
turn. Reply: numbers of turns and bytes of the rollout."""

PATH = """
local found, seen, turn, holders = {}, {}, ARGV[1], {}
while turn ~= '' do
    local entries = redis.call('HGET', KEYS[2], turn)
    if not entries or seen[turn] then
        return {}
    end
    seen[turn] = true
    found[#found + 1] = redis.call('HGET', KEYS[1], turn)
    local length = entries:byte(1)
    holders[#holders + 1] = entries:sub(length + 3, length + 2 + entries:byte(length + 2))
    turn = entries:sub(2, length + 1)
end
for _, holder in ipairs(holders) do
    if holder ~= '' and not seen[holder] then
        found[#found + 1] = redis.call('HGET', KEYS[1], holder) or nil
    end
end
return found
"""
"""Keys: as `ADD`. Arguments: turn. Reply: the packed turns of its path and those that hold prompts for them,
in any order; nothing if a turn of the path is missing."""

CLAIM = """
if redis.call('HEXISTS', KEYS[1], ARGV[1]) == 0 then
    return 0
end
return redis.call('HSETNX', KEYS[3], ARGV[1], 'claimed')
"""
"""Keys: as `ADD`. Arguments: turn. Reply: 1 if it was open."""

RELEASE = """
if redis.call('HGET', KEYS[3], ARGV[1]) == 'claimed' then
    redis.call('HDEL', KEYS[3], ARGV[1])
end
"""
"""Keys: as `ADD`. Arguments: turn."""

REMOVE_TURNS = """
local entries = redis.call('HGETALL', KEYS[2])
redis.call('UNLINK', unpack(KEYS))
return entries
"""
"""Keys: as `ADD`. Reply: turn, packed entries, turn, ..."""

_SPACE = """
local function drop(name)
    redis.call('DECRBY', KEYS[3], redis.call('HSTRLEN', KEYS[1], name))
    redis.call('HDEL', KEYS[1], name)
    redis.call('ZREM', KEYS[2], name)
end
local function drop_expired(now)
    for _, name in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 500)) do
        drop(name)
    end
end
"""
PUT = (
    _SPACE
    + """
local name, value, expires, now, most, before = unpack(ARGV)
drop_expired(now)
local last = tonumber(redis.call('ZSCORE', KEYS[2], name) or 0)
local held = last > tonumber(now) and redis.call('HGET', KEYS[1], name) or ''
if (before and held ~= before) or #value > tonumber(most) then
    return 0
end
redis.call('INCRBY', KEYS[3], #value - redis.call('HSTRLEN', KEYS[1], name))
redis.call('HSET', KEYS[1], name, value)
redis.call('ZADD', KEYS[2], expires, name)
while tonumber(redis.call('GET', KEYS[3])) > tonumber(most) do
    drop(redis.call('ZRANGE', KEYS[2], 0, 0)[1])
end
return 1
"""
)
"""Keys: values, expiry and bytes of a space. Arguments: name, value, time at which it expires, now, bytes
that the space may hold; if it matters, the value that must be there, or '' for none. Reply: 1 if it is
kept."""

GET = """
local found = {}
local names = ARGV[2] == '*' and redis.call('HKEYS', KEYS[1]) or {unpack(ARGV, 3)}
for _, name in ipairs(names) do
    local expires = redis.call('ZSCORE', KEYS[2], name)
    if expires and tonumber(expires) > tonumber(ARGV[1]) then
        found[#found + 1] = name
        found[#found + 1] = redis.call('HGET', KEYS[1], name)
    end
end
return found
"""
"""Keys: as `PUT`. Arguments: now, `*` for all, names. Reply: name, value, name, ..."""

TAKE = (
    _SPACE
    + """
drop_expired(ARGV[2])
local value = redis.call('HGET', KEYS[1], ARGV[1])
if value then
    drop(ARGV[1])
end
return value
"""
)
"""Keys: as `PUT`. Arguments: name, now. Reply: the value."""

DROP_EXPIRED = f"{_SPACE}drop_expired(ARGV[1])"
"""Keys: as `PUT`. Arguments: now."""

_USED = """
local p = KEYS[1]
local function touch(rollout, now)
    local tenant = redis.call('HGET', p .. 'rollout:' .. rollout, 'tenant')
    local last, used = unpack(redis.call('ZRANGE', p .. 'used', -1, -1, 'WITHSCORES'))
    if last and last ~= rollout and tonumber(used) >= tonumber(now) then
        now = string.format('%.17g', tonumber(used) + 0.000001)
    end
    redis.call('ZADD', p .. 'used', 'GT', now, rollout)
    redis.call('ZADD', p .. 'used:' .. tenant, 'GT', now, rollout)
end
local function save_session(rollout, tenant, explicit, created, used, defaults, overrides, metadata)
    local name = p .. 'rollout:' .. rollout
    local before = redis.call('HMGET', name, 'tenant', 'defaults', 'overrides', 'metadata')
    if before[1] and before[1] ~= tenant then
        redis.call('ZREM', p .. 'used:' .. before[1], rollout)
    end
    local growth = #defaults + #overrides + #metadata
    for i = 2, 4 do
        growth = growth - #(before[i] or '')
    end
    redis.call('HSET', name, 'tenant', tenant, 'explicit', explicit, 'created', created,
        'defaults', defaults, 'overrides', overrides, 'metadata', metadata)
    redis.call('HINCRBY', name, 'size', growth)
    redis.call('ZADD', p .. 'used', used, rollout)
    redis.call('ZADD', p .. 'used:' .. tenant, used, rollout)
    return redis.call('HINCRBY', p .. 'totals', 'size', growth)
end
"""
"""`p` is the prefix. `touch` makes a rollout the last used of all, even if a clock was set back.
`save_session` takes what `redis._session_arguments` returns, and returns the bytes held afterwards."""

COUNT = (
    _USED
    + """
local rollout, now, ambiguous, turns, bytes = ARGV[1], unpack(ARGV, 9, 12)
local name = p .. 'rollout:' .. rollout
if redis.call('EXISTS', name) == 0 then
    save_session(unpack(ARGV, 1, 8))
end
if ambiguous == '1' then
    redis.call('HSET', name, 'ambiguous', 1)
end
local before = redis.call('HMGET', name, 'turns', 'bytes')
local more = math.max(0, tonumber(turns) - (before[1] or 0))
local growth = math.max(0, tonumber(bytes) - (before[2] or 0))
local size = tonumber(redis.call('HINCRBY', p .. 'totals', 'size', growth))
if more > 0 then
    touch(rollout, now)
    redis.call('HINCRBY', name, 'turns', more)
    redis.call('HINCRBY', name, 'bytes', growth)
    redis.call('HINCRBY', name, 'size', growth)
    redis.call('HINCRBY', p .. 'totals', 'turns', more)
end
return size
"""
)
"""Arguments: the session (8, see `redis._session_arguments`), now, 1 if it is ambiguous, the reply of `ADD`.
Reply: bytes held afterwards. Numbers of a call that was overtaken change nothing."""

SAVE_SESSION = f"{_USED}return save_session(unpack(ARGV))"
"""Arguments: the session. Reply: bytes held afterwards."""

PIN = (
    _USED
    + """
local rollout, now, pinned_until = ARGV[1], ARGV[2], ARGV[3]
local name = p .. 'rollout:' .. rollout
if redis.call('EXISTS', name) == 0 then
    return
end
touch(rollout, now)
if tonumber(redis.call('HGET', name, 'pinned_until') or 0) < tonumber(pinned_until) then
    redis.call('HSET', name, 'pinned_until', pinned_until)
end
"""
)
"""Arguments: rollout, now, until."""

_REPLY_SESSION = (
    _REPLY
    + """
local function reply_session(to, rollout, used)
    local fields = redis.call('HGETALL', KEYS[1] .. 'rollout:' .. rollout)
    reply(to, rollout, used, #fields)
    reply(to, unpack(fields))
end
"""
)
"""`reply_session` appends a rollout, its `used`, the number of strings that follow, and the fields of its
hash, each with its value."""

SESSION = (
    _REPLY_SESSION
    + """
local used, session = redis.call('ZSCORE', KEYS[1] .. 'used', ARGV[1]), {}
if used then
    reply_session(session, ARGV[1], used)
end
return table.concat(session)
"""
)
"""Arguments: rollout. Reply: what `reply_session` appends, if there is one."""

LIST_SESSIONS = (
    _REPLY_SESSION
    + """
local name, limit, used, id = KEYS[1] .. ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4]
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

_REMOVE = """
local p = KEYS[1]
local function remove(rollout)
    local name = p .. 'rollout:' .. rollout
    local tenant, size, turns = unpack(redis.call('HMGET', name, 'tenant', 'size', 'turns'))
    -- before HINCRBY: if its memory is full, a server refuses that as a first change
    redis.call('DEL', name, p .. 'rewards:' .. rollout)
    redis.call('ZREM', p .. 'used', rollout)
    redis.call('ZREM', p .. 'used:' .. tenant, rollout)
    redis.call('ZREM', p .. 'feed', rollout)
    redis.call('ZREM', p .. 'feed:' .. tenant, rollout)
    redis.call('HINCRBY', p .. 'totals', 'turns', 0 - (turns or 0))
    redis.call('HINCRBY', p .. 'totals', 'size', 0 - size)
    redis.call('SADD', p .. 'removed', rollout)
    return tonumber(turns or 0), tonumber(size)
end
"""

REMOVE = (
    _REMOVE
    + """
if redis.call('EXISTS', p .. 'rollout:' .. ARGV[1]) == 0 then
    return 0
end
remove(ARGV[1])
return 1
"""
)
"""Arguments: rollout. Reply: 1 if there was one."""

EVICT = (
    _REMOVE
    + """
local own, target, most = ARGV[1], tonumber(ARGV[2]), tonumber(ARGV[3])
local oldest, now, step = tonumber(ARGV[4]), tonumber(ARGV[5]), tonumber(ARGV[6])
local read = {}
for i = 7, #ARGV, 2 do
    read[ARGV[i]] = tonumber(ARGV[i + 1])
end
local left = tonumber(redis.call('HGET', p .. 'totals', 'size') or 0)
local removed, turns, size, missed = {}, 0, 0, 0
local function pinned(rollout)
    return tonumber(redis.call('HGET', p .. 'rollout:' .. rollout, 'pinned_until') or 0) > now
end
local function evict(rollout)
    local position = tonumber(redis.call('ZSCORE', p .. 'feed', rollout) or 0)
    if position > (read[redis.call('HGET', p .. 'rollout:' .. rollout, 'tenant')] or position) then
        missed = missed + 1
    end
    local count, bytes = remove(rollout)
    removed[#removed + 1] = rollout
    turns, size, left = turns + count, size + bytes, left - bytes
end
if left <= most then
    target = left
end
local skipped = 0
while #removed + turns < step do
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
if #removed == 0 and own ~= '' and not pinned(own) then
    if tonumber(redis.call('HGET', p .. 'rollout:' .. own, 'size') or 0) > most then
        evict(own)
    end
end
return {turns, size, missed, unpack(removed)}
"""
)
"""Arguments: a rollout to evict last or '', bytes to reach, bytes allowed, time before which a last use is
too old, now, rollouts and turns to evict in one step; tenants, each with what all its consumers have read.
Reply: numbers of evicted turns, bytes, and finished rollouts that a consumer has not read; the rollouts."""

REMOVED = """
local found = {}
for _, rollout in ipairs(redis.call('SRANDMEMBER', KEYS[1] .. 'removed', 500)) do
    if redis.call('EXISTS', KEYS[1] .. 'rollout:' .. rollout) == 0 then
        found[#found + 1] = rollout
    end
end
return found
"""
"""Reply: rollouts that were removed from the list by a process that ended before it removed their turns."""

FORGET = "redis.call('SREM', KEYS[1] .. 'removed', ARGV[1])"
"""Arguments: rollout whose turns are removed."""

_FINISH = """
local p = KEYS[1]
local function finish(rollout, cause, now, changed, only_again)
    local name = p .. 'rollout:' .. rollout
    local tenant, turns, finished_turns, revision =
        unpack(redis.call('HMGET', name, 'tenant', 'turns', 'finished_turns', 'revision'))
    if not turns or (only_again and not revision) or (finished_turns == turns and not changed) then
        return 0
    end
    local last = tonumber(redis.call('HGET', p .. 'state', 'last') or 0)
    local position = string.format('%.0f', math.max(tonumber(now), last + 1))
    redis.call('HSET', p .. 'state', 'last', position)
    redis.call('ZADD', p .. 'feed', position, rollout)
    redis.call('ZADD', p .. 'feed:' .. tenant, position, rollout)
    redis.call('HSET', name, 'finished_turns', turns, 'revision', (revision or 0) + 1, 'cause', cause)
    return 1
end
"""
"""`finish` takes a rollout, a cause, and the time in microseconds; it returns 1 if it put the rollout at the
end. `changed`: more than its turns changed since it was finished. `only_again`: only if it is in the feed."""

FINISH = f"{_FINISH}return finish(unpack(ARGV))"
"""Arguments: rollout, cause, now. Reply: 1 if it was put at the end."""

SET_REWARDS = (
    _FINISH
    + """
local rollout, now, whole, changed = ARGV[1], ARGV[2], false, false
if redis.call('EXISTS', p .. 'rollout:' .. rollout) == 0 then
    return 0
end
for i = 3, #ARGV, 2 do
    local before = redis.call('HGET', p .. 'rewards:' .. rollout, ARGV[i])
    whole, changed = whole or ARGV[i] == '', changed or before ~= ARGV[i + 1]
    redis.call('HSET', p .. 'rewards:' .. rollout, ARGV[i], ARGV[i + 1])
end
if #ARGV > 2 then
    finish(rollout, 'reward', now, changed, not whole)
end
return 1
"""
)
"""Arguments: rollout, now; for each reward turn and value. Reply: 1 if there is such a rollout."""

REWARDS = "return redis.call('HGETALL', KEYS[1] .. 'rewards:' .. ARGV[1])"
"""Arguments: rollout. Reply: turn, reward, turn, ..."""

FINISH_IDLE = (
    _FINISH
    + """
local before, limit, now = ARGV[1], tonumber(ARGV[2]), ARGV[3]
local used = redis.call('HGET', p .. 'state', 'idle_used')
local low = used and '(' .. used or '-inf'
local found = redis.call('ZRANGEBYSCORE', p .. 'used', low, '(' .. before, 'WITHSCORES', 'LIMIT', 0, limit)
if #found == 0 then
    return 0
end
local last = found[#found]
for i = 1, #found, 2 do
    finish(found[i], 'idle', now)
end
if #found == 2 * limit then
    -- also rollouts used at the same time as the last of them: the next call starts after that time
    for _, rollout in ipairs(redis.call('ZRANGEBYSCORE', p .. 'used', last, last)) do
        finish(rollout, 'idle', now)
    end
end
redis.call('HSET', p .. 'state', 'idle_used', last)
return #found / 2
"""
)
"""Arguments: time before which the last use was, limit, now. Reply: number of rollouts it looked at."""

FINISHED = (
    _REPLY_SESSION
    + """
local p, name, after, limit = KEYS[1], KEYS[1] .. ARGV[1], ARGV[2], ARGV[3]
local found = redis.call('ZRANGEBYSCORE', name, '(' .. after, '+inf', 'WITHSCORES', 'LIMIT', 0, limit)
local entries = {}
for i = 1, #found, 2 do
    local used = redis.call('ZSCORE', p .. 'used', found[i])
    local revision, cause = unpack(redis.call('HMGET', p .. 'rollout:' .. found[i], 'revision', 'cause'))
    reply(entries, found[i + 1], revision, cause)
    reply_session(entries, found[i], used)
end
return table.concat(entries)
"""
)
"""Arguments: name of a sorted set, position, limit.
Reply: for each finished rollout its position, revision, cause, and what `reply_session` appends."""

FEED_STATE = """
local last = redis.call('HGET', KEYS[1] .. 'state', 'last') or '0'
if ARGV[1] == '' then
    return {last, '0', '0'}
end
local name, low = KEYS[1] .. 'feed:' .. ARGV[2], '(' .. ARGV[1]
local oldest = redis.call('ZRANGEBYSCORE', name, low, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
return {last, tostring(redis.call('ZCOUNT', name, low, '+inf')), oldest or '0'}
"""
"""Arguments: position or '', tenant. Reply: the last position; of the rollouts of the tenant after the given
one their number and the position of the first."""

USAGE = """
local turns, size = unpack(redis.call('HMGET', KEYS[1] .. 'totals', 'turns', 'size'))
return {redis.call('ZCARD', KEYS[1] .. 'used'), turns or '0', size or '0'}
"""
"""Reply: rollouts, turns, bytes."""

TIME = "return redis.call('TIME')"
"""Reply: seconds and microseconds of the server's clock."""
