"""What a Redis store keeps on the servers, and its Lua scripts. Each runs in one step of one server.

    tokenproxy:version             of all this
    tokenproxy:key:KEY             sorted set, all scores 0: the turns under a key of the index, as members
    tokenproxy:turn:TURN           string: the rollout of a turn
    tokenproxy:{s/ROLLOUT}:turns   hash: turn to packed turn
    tokenproxy:{s/ROLLOUT}:entries hash: turn to its parent, prompt_turn and index entries, as `pack_parts`
    tokenproxy:{s/ROLLOUT}:state   hash: turn to `claimed` or `continued`; `bytes` and `sampled`: of its
                                   turns, and the number of their sampled ids
    tokenproxy:{v/SPACE}:values    hash: name to packed value
    tokenproxy:{v/SPACE}:expiry    sorted set: names by the time when they expire
    tokenproxy:{v/SPACE}:bytes     string: bytes of the values

The list of sessions and the feed are in one slot, under `tokenproxy:{sessions}:`

    used             sorted set: rollouts by the time of their last use
    used:TENANT      sorted set: the same for one tenant
    rollout:ROLLOUT  hash: the session, each reward as `reward:TURN`, and `bytes` of its turns; of a finished
                     rollout also finished_turns: their number at that time
    feed             sorted set: finished rollouts by their position
    feed:TENANT      sorted set: the same for one tenant
    totals           hash: size, last (position of the feed)
    removed          set: rollouts that were removed from the list, and whose turns are still to be removed

A member of the index is `ids`, turn and rollout, each of the first two after a byte with its length: members
of a group are neighbours, from the oldest to the newest. Turn and rollout are empty in the one member that
stands for all evicted turns of its group.

Scripts of the list get two keys, its prefix and one under which nothing is stored, and compute the names that
they use. That matters while a cluster moves the slot to another server: part of the keys is on each, and a
command with several keys that are on neither is refused (`TRYAGAIN`) until the slot has moved.
"""

from tokenproxy.record.store import LAST_POSITION, LATEST_S, MOST_BYTES
from tokenproxy.record.turn import FOUND_AT_MOST

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
local replies = {}
local function reply(...)
    for _, value in ipairs({...}) do
        value = tostring(value)
        replies[#replies + 1] = #value .. ':' .. value
    end
end
"""
"""`reply` adds values to `replies`, each after its length: `5:hello`. A client reads one long string much
faster than nested lists."""

FIND = (
    _REPLY
    + f"""
for i, name in ipairs(KEYS) do
    local total = redis.call('ZCARD', name)
    if total > 0 then
        local members = redis.call('ZREVRANGE', name, 0, {FOUND_AT_MOST - 1})
        reply(i - 1, total, redis.call('ZRANGE', name, 0, 0)[1], #members, unpack(members))
    end
end
return table.concat(replies)
"""
)
"""Keys: of the index. Reply: for each that holds something its number (from 0), the number of members, the
first of them, and how many of the last ones follow, the last first."""

ADD = """
for i = 1, #ARGV, 5 do
    local turn, parent, entries, packed, sampled = unpack(ARGV, i, i + 4)
    if redis.call('HSETNX', KEYS[1], turn, packed) == 1 then
        redis.call('HSET', KEYS[2], turn, entries)
        redis.call('HINCRBY', KEYS[3], 'bytes', #entries + #packed)
        redis.call('HINCRBY', KEYS[3], 'sampled', sampled)
        if parent ~= '' then
            redis.call('HSET', KEYS[3], parent, 'continued')
        end
    end
end
local bytes, sampled = unpack(redis.call('HMGET', KEYS[3], 'bytes', 'sampled'))
return {redis.call('HLEN', KEYS[1]), tonumber(bytes), tonumber(sampled)}
"""
"""Keys: turns, entries and state of a rollout. Arguments: for each turn its id, parent or '', entries, packed
turn, number of its sampled ids. Reply: numbers of turns, bytes and sampled ids of the rollout."""

PATH = """
local found, seen, turn, holders = {}, {}, ARGV[1], {}
while turn ~= '' and #holders < tonumber(ARGV[2]) do
    local entries = redis.call('HGET', KEYS[2], turn)
    local packed = redis.call('HGET', KEYS[1], turn)
    if not entries or not packed or seen[turn] then
        return {}
    end
    seen[turn] = true
    found[#found + 1] = turn
    found[#found + 1] = packed
    local length = entries:byte(1)
    holders[#holders + 1] = entries:sub(length + 3, length + 2 + entries:byte(length + 2))
    turn = entries:sub(2, length + 1)
end
for _, holder in ipairs(holders) do
    local packed = holder ~= '' and not seen[holder] and redis.call('HGET', KEYS[1], holder)
    if packed then
        found[#found + 1] = holder
        found[#found + 1] = packed
    end
end
return found
"""
"""Keys: as `ADD`. Arguments: turn, limit. Reply: turn, packed turn, turn, ...: the last of its path and those
that hold prompts for them, in any order; nothing if one of the path is missing."""

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

PUT = """
local function add(bytes)
    local held = tonumber(redis.call('GET', KEYS[3]) or 0)
    held = held and math.abs(held) < 2^53 and held or 0  -- it is damaged
    redis.call('SET', KEYS[3], string.format('%.0f', held + bytes))
end
local function drop(name)
    add(0 - redis.call('HSTRLEN', KEYS[1], name))
    redis.call('HDEL', KEYS[1], name)
    redis.call('ZREM', KEYS[2], name)
end
local name, value, expires, now, most_bytes, most, before = unpack(ARGV)
for _, expired in ipairs(redis.call('ZRANGEBYSCORE', KEYS[2], '-inf', now, 'LIMIT', 0, 500)) do
    drop(expired)
end
local there = tonumber(redis.call('ZSCORE', KEYS[2], name) or 0) > tonumber(now)
local held = there and redis.call('HGET', KEYS[1], name) or ''
if (before and held ~= before) or #value > tonumber(most_bytes) then
    return 0
end
if held == '' and tonumber(most) < 2147483647 then
    local group, count = name:match('^.*/') or '', 0
    for _, other in ipairs(redis.call('HKEYS', KEYS[1])) do
        count = count + (other:sub(1, #group) == group and 1 or 0)
    end
    if count >= tonumber(most) then
        return 0
    end
end
if value == '' then
    drop(name)
    return there and 1 or 0
end
add(#value - redis.call('HSTRLEN', KEYS[1], name))
redis.call('HSET', KEYS[1], name, value)
redis.call('ZADD', KEYS[2], expires, name)
while tonumber(redis.call('GET', KEYS[3])) > tonumber(most_bytes) do
    drop(redis.call('ZRANGE', KEYS[2], 0, 0)[1])
end
return 1
"""
"""Keys: values, expiry and bytes of a space. Arguments: name, value or '' to remove it, time at which it
expires, now, bytes that the space may hold, `most` of `Store.put`; if it matters, the value that must be
there, or '' for none.
Reply: 1 if it is kept, or was removed."""

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

_SOUND = f"""
local function sound(value, beyond)
    local number = tonumber(value)
    return number and number > -beyond and number < beyond and value or 0
end
local function highest(name, beyond)
    local below = string.format('(%.0f', beyond)
    return redis.call('ZREVRANGEBYSCORE', name, below, 0, 'WITHSCORES', 'LIMIT', 0, 1)[2]
end
local beyond, latest = {LAST_POSITION}, {LATEST_S:.0f}
local function grow(name, field, number)
    local held = sound(redis.call('HGET', name, field), {MOST_BYTES})
    redis.call('HSET', name, field, string.format('%.0f', held + number))
    return held + number
end
"""
"""`sound` replaces a damaged number by 0: a text, or one beyond what it may be. `highest` returns the highest
score of a sorted set below a number, `grow` adds to a number in a hash."""

_TOUCH = (
    _SOUND
    + """
local p, rollout, now = KEYS[1], ARGV[1], ARGV[2]
local name = p .. 'rollout:' .. rollout
local function touch(tenant)
    local last = highest(p .. 'used', latest) or 0
    now = string.format('%.17g', math.max(tonumber(now), tonumber(last) + 0.000001))
    redis.call('HSET', name, 'used', now)
    redis.call('ZADD', p .. 'used', now, rollout)
    redis.call('ZADD', p .. 'used:' .. tenant, now, rollout)
end
"""
)
"""`p` is the prefix. `touch` makes a rollout the last used of all, even if a clock was set back."""

SAVE = (
    _TOUCH
    + """
local turns, bytes, sampled, first, ambiguous, tenant, explicit, created = unpack(ARGV, 3, 10)
local before = redis.call('HMGET', name, 'turns', 'bytes', 'tenant', 'sampled_ids')
local more, size = turns == '' and 0 or math.max(0, turns - sound(before[1], beyond)), 0
if not before[3] or turns == '' then
    if before[3] and before[3] ~= tenant then
        redis.call('ZREM', p .. 'used:' .. before[3], rollout)
    end
    redis.call('HSET', name, 'id', rollout, 'tenant', tenant, 'explicit', explicit, 'created', created)
    for i = 11, #ARGV, 3 do
        size = size - redis.call('HSTRLEN', name, ARGV[i + 1])
        redis.call(ARGV[i], name, ARGV[i + 1], ARGV[i + 2])
        size = size + redis.call('HSTRLEN', name, ARGV[i + 1])
    end
    touch(tenant)
elseif more > 0 then
    touch(before[3])
end
if more > 0 then
    local grown = math.max(0, bytes - sound(before[2], beyond))
    grow(name, 'turns', more)
    grow(name, 'bytes', grown)
    grow(name, 'sampled_ids', math.max(0, sampled - sound(before[4], beyond)))
    redis.call('HSETNX', name, 'first_turn', first)
    size = size + grown
    if ambiguous == '1' then
        redis.call('HSET', name, 'ambiguous', 1)
    end
end
grow(name, 'size', size)
return grow(p .. 'totals', 'size', size)
"""
)
"""Arguments: rollout, now; the reply of `ADD`, or '' three times to describe the session; when its first turn
was requested; 1 if it is ambiguous; its tenant, explicit, created; HSET, or HSETNX to keep what
is there, with name and value of each field of its description. Reply: bytes held afterwards. Numbers of a
call that was overtaken change nothing."""

PIN = (
    _TOUCH
    + """
local tenant, pinned_until = unpack(redis.call('HMGET', name, 'tenant', 'pinned_until'))
if tenant then
    touch(tenant)
    redis.call('HSET', name, 'pinned_until', math.max(sound(pinned_until, latest), ARGV[3]))
end
return tenant and 1 or 0
"""
)
"""Arguments: rollout, now, until. Reply: 1 if there is such a rollout."""

LIST = (
    _REPLY
    + _SOUND
    + """
local p, way, name, low, high, limit = KEYS[1], ARGV[1], KEYS[1] .. ARGV[2], unpack(ARGV, 3)
local found, count, top = {ARGV[2]}, 0, nil
if way ~= 'one' then
    count = redis.call('ZCOUNT', name, low, high)
    top = highest(name, beyond)
    found = way == 'down' and redis.call('ZREVRANGEBYSCORE', name, high, low, 'LIMIT', 0, limit)
        or redis.call('ZRANGEBYSCORE', name, low, high, 'LIMIT', 0, limit)
end
local size, last = unpack(redis.call('HMGET', p .. 'totals', 'size', 'last'))
reply(sound(size, beyond), sound(last, beyond), top or 0, count)
for _, rollout in ipairs(found) do
    local fields = redis.call('HGETALL', p .. 'rollout:' .. rollout)
    if #fields > 0 then
        reply(#fields)
        for _, field in ipairs(fields) do
            reply(field)
        end
    end
end
return table.concat(replies)
"""
)
"""Arguments: `one` and a rollout; or `up` or `down`, name of a sorted set, lowest and highest score, limit.
Reply: bytes held, the last position of the feed, the highest score, members between the scores; for each
session how many strings follow, and the fields of its hash, each with its value."""

REMOVE = (
    _SOUND
    + """
local p, rollout = KEYS[1], ARGV[1]
local name = p .. 'rollout:' .. rollout
local tenant, size, pinned_until = unpack(redis.call('HMGET', name, 'tenant', 'size', 'pinned_until'))
if not tenant or tonumber(sound(pinned_until, latest)) > tonumber(ARGV[2]) then
    return 0
end
-- before HSET: if its memory is full, a server refuses that as a first change
redis.call('DEL', name)
for _, list in ipairs({'used', 'used:' .. tenant, 'feed', 'feed:' .. tenant}) do
    redis.call('ZREM', p .. list, rollout)
end
grow(p .. 'totals', 'size', 0 - sound(size, beyond))
redis.call('SADD', p .. 'removed', rollout)
return 1
"""
)
"""Arguments: rollout, time. Reply: 1 if there was one that is not pinned at this time."""

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

FINISH = (
    _SOUND
    + """
local p, rollout, cause, now = KEYS[1], unpack(ARGV, 1, 3)
local name, whole, changed = p .. 'rollout:' .. rollout, #ARGV == 3, false
local tenant, turns, finished_turns, revision =
    unpack(redis.call('HMGET', name, 'tenant', 'turns', 'finished_turns', 'revision'))
if not tenant then
    return 0
end
for i = 4, #ARGV, 2 do
    local field = 'reward:' .. ARGV[i]
    whole = whole or ARGV[i] == ''
    changed = changed or redis.call('HGET', name, field) ~= ARGV[i + 1]
    redis.call('HSET', name, field, ARGV[i + 1])
end
if not turns or (finished_turns == turns and not changed) or not (whole or revision) then
    return 0
end
local last = sound(redis.call('HGET', p .. 'totals', 'last'), beyond)
local position = string.format('%.0f', math.max(tonumber(now), last + 1))
redis.call('HSET', p .. 'totals', 'last', position)
redis.call('ZADD', p .. 'feed', position, rollout)
redis.call('ZADD', p .. 'feed:' .. tenant, position, rollout)
redis.call('HSET', name, 'finished_turns', turns, 'revision', sound(revision, beyond) + 1, 'cause', cause,
    'position', position)
return 1
"""
)
"""Arguments: rollout, cause, now in microseconds; for each reward turn and value. Reply: 1 if it was put at
the end of the feed."""
