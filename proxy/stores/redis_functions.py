"""What a Redis store keeps on the server, and the Lua functions that its scripts share.

All names begin with a prefix, which is KEYS[1] of every script:

    used               sorted set: rollouts by the time of their last use
    used:TENANT        sorted set: the same for one tenant
    rollout:ROLLOUT    hash: the session, without its id and `used`; of a finished rollout also revision,
                       cause, and finished_turns: the number of its turns at that time
    turns:ROLLOUT      sorted set, all scores 0: ids of its turns
    rewards:ROLLOUT    hash: turn to reward
    turn:TURN          hash: packed, parent, prompt_turn, rollout, entries, open (0 or 1), continued
    key:KEY            sorted set, all scores 0: the turns under a key, as index members
    evicted            sorted set: keys by the number of their eviction, which `evictions` counts
    responses          sorted set: id and key of responses, by the time when they were kept
    responses:KEY      hash: id to packed response
    documents          sorted set: ids of documents, by the time when they were kept
    document:ID        string: packed document
    feed               sorted set: finished rollouts by their position
    feed:TENANT        sorted set: the same for one tenant
    feed_state         hash: last (position), idle_used (of the last rollout that was looked at)
    consumers          hash: consumer of the feed, as TENANT/NAME, to the position that it acknowledged
    consumers_at       sorted set: consumers by the time when they were last written
    replicas:FLEET     hash: URL of a replica to its change
    clock              hash: seen, steady_since; see `eviction.ClockRecord`
    totals             hash: turns, size, response_bytes, document_bytes
    secret             see `Store.secret`
    version            of all this

An index member consists of a byte with the length of `ids`, `ids`, `1` if the turn is open or `0`, and the
turn's id. Members are sorted by their bytes: those of a group are neighbours, first its closed turns, then
its open ones, both from the oldest to the newest.

Scripts compute the names of the keys they use from the prefix. On one server it is `tokenproxy:`. In a
cluster, which must have all of a script's keys in one slot, the data are split into partitions, each with all
of this under a prefix with a hash tag of its own, and next to them:

    tokenproxy:partitions    number of partitions
"""

PREFIX = b"tokenproxy:"

PARTS = """
local p = KEYS[1]
local function parts_of(packed)
    local parts, start = {}, 1
    while start <= #packed do
        local length = packed:byte(start)
        parts[#parts + 1] = packed:sub(start + 1, start + length)
        start = start + 1 + length
    end
    return parts
end
"""
"""`p` is the prefix; `parts_of` is the inverse of `packed.pack_parts`."""

REPLY = """
local function reply(to, ...)
    for _, value in ipairs({...}) do
        value = tostring(value)
        to[#to + 1] = #value .. ':' .. value
    end
end
"""
"""`reply` appends values to a list, each after its length: `5:hello`. A client reads one long string much
faster than nested lists."""

REPLY_SESSION = """
local function reply_session(to, rollout, used)
    local fields = redis.call('HGETALL', KEYS[1] .. 'rollout:' .. rollout)
    reply(to, rollout, used, #fields)
    reply(to, unpack(fields))
end
"""
"""`reply_session` appends a rollout, its `used`, the number of strings that follow, and the fields of its
hash, each with its value. It needs REPLY."""

INDEX = (
    PARTS
    + """
local function group_prefix(ids)
    return string.char(#ids) .. ids
end
local function turn_of(member)
    return member:sub(member:byte(1) + 3)
end
local function rollout_of(turn)
    return redis.call('HGET', p .. 'turn:' .. turn, 'rollout')
end
local function set_open(turn, packed_entries, open)
    local entries = parts_of(packed_entries)
    for i = 1, #entries, 2 do
        local name, prefix = p .. 'key:' .. entries[i], group_prefix(entries[i + 1])
        redis.call('ZREM', name, prefix .. (1 - open) .. turn)
        redis.call('ZADD', name, 0, prefix .. open .. turn)
    end
    redis.call('HSET', p .. 'turn:' .. turn, 'open', open)
end
"""
)

FLAG = """
local function flag(rollout)
    if redis.call('EXISTS', p .. 'rollout:' .. rollout) == 1 then
        redis.call('HSET', p .. 'rollout:' .. rollout, 'ambiguous', 1)
    end
end
local function flag_equal(name, rollout)
    local found = 0
    local function flag_with(member)
        local owner = rollout_of(turn_of(member))
        if owner ~= rollout then
            flag(owner)
            found = 1
        end
    end
    local last = redis.call('ZREVRANGE', name, 0, 0)[1]
    if last then
        flag_with(last)
        for _, member in ipairs(redis.call('ZRANGEBYLEX', name, '[\\0', '(\\1')) do
            flag_with(member)
        end
    end
    return found
end
"""
"""`flag` makes a rollout ambiguous. It needs INDEX.
`flag_equal` does so with the rollouts but one that have turns under the key of a name; it returns 1 if there
are any. It looks at all turns without ids and at one with ids: if turns with ids belong to several rollouts,
all of those became ambiguous when the second was added."""

SESSIONS = """
local function set_used(rollout, tenant, used)
    redis.call('ZADD', p .. 'used', used, rollout)
    redis.call('ZADD', p .. 'used:' .. tenant, used, rollout)
end
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
    set_used(rollout, tenant, used)
    return redis.call('HINCRBY', p .. 'totals', 'size', growth)
end
"""
"""`touch` makes a rollout the last used of all, even if a clock was set back.
`save_session` takes what `redis._session_arguments` returns, and returns the bytes held afterwards."""

FEED = """
local function finish(rollout, cause, now, step, changed, only_again)
    local name = p .. 'rollout:' .. rollout
    local tenant, turns, finished_turns, revision =
        unpack(redis.call('HMGET', name, 'tenant', 'turns', 'finished_turns', 'revision'))
    if not turns or (only_again and not revision) or (finished_turns == turns and not changed) then
        return 0
    end
    local last = tonumber(redis.call('HGET', p .. 'feed_state', 'last') or 0)
    local position = tonumber(now)
    if last >= position then
        position = position + step * (math.floor((last - position) / step) + 1)
    end
    position = string.format('%.0f', position)
    redis.call('HSET', p .. 'feed_state', 'last', position)
    redis.call('ZADD', p .. 'feed', position, rollout)
    redis.call('ZADD', p .. 'feed:' .. tenant, position, rollout)
    redis.call('HSET', name, 'finished_turns', turns, 'revision', (revision or 0) + 1, 'cause', cause)
    return 1
end
local function undelivered(rollout)
    local position = tonumber(redis.call('ZSCORE', p .. 'feed', rollout) or 0)
    local prefix = redis.call('HGET', p .. 'rollout:' .. rollout, 'tenant') .. '/'
    local consumers = redis.call('HGETALL', p .. 'consumers')
    for i = 1, #consumers, 2 do
        if consumers[i]:sub(1, #prefix) == prefix and tonumber(consumers[i + 1]) < position then
            return 1
        end
    end
    return 0
end
"""
"""`finish` takes a rollout, a cause, the time in microseconds, and a step; it returns 1 if it put the rollout
at the end: at this time, or later by a multiple of the step. `changed`: more than its turns changed since it
was finished. `only_again`: only if it is in the feed.
`undelivered` returns 1 if a rollout is finished and a consumer of its tenant has not acknowledged it."""

REMOVE = (
    INDEX
    + FEED
    + """
local function remember_evicted(keys, limit)
    for _, key in ipairs(keys) do
        redis.call('ZADD', p .. 'evicted', redis.call('INCR', p .. 'evictions'), key)
    end
    redis.call('ZREMRANGEBYRANK', p .. 'evicted', 0, -limit - 1)
end
local function remove(rollout, keys)
    local turns = redis.call('ZRANGE', p .. 'turns:' .. rollout, 0, -1)
    for _, turn in ipairs(turns) do
        local entries = parts_of(redis.call('HGET', p .. 'turn:' .. turn, 'entries'))
        for i = 1, #entries, 2 do
            local prefix = group_prefix(entries[i + 1])
            redis.call('ZREM', p .. 'key:' .. entries[i], prefix .. '0' .. turn, prefix .. '1' .. turn)
            keys[#keys + 1] = entries[i]
        end
        redis.call('UNLINK', p .. 'turn:' .. turn)
    end
    local tenant, size = unpack(redis.call('HMGET', p .. 'rollout:' .. rollout, 'tenant', 'size'))
    -- before HINCRBY: if its memory is full, a server refuses that as a first change
    redis.call('DEL', p .. 'turns:' .. rollout, p .. 'rollout:' .. rollout, p .. 'rewards:' .. rollout)
    redis.call('ZREM', p .. 'used', rollout)
    redis.call('ZREM', p .. 'used:' .. tenant, rollout)
    redis.call('ZREM', p .. 'feed', rollout)
    redis.call('ZREM', p .. 'feed:' .. tenant, rollout)
    redis.call('HINCRBY', p .. 'totals', 'turns', 0 - #turns)
    redis.call('HINCRBY', p .. 'totals', 'size', 0 - size)
    return #turns, tonumber(size)
end
"""
)
