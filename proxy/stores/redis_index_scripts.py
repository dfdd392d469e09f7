"""Lua scripts that find turns, and make them open or not. Each runs in one step of the server."""

from proxy.history.store import FOUND_AT_MOST
from proxy.stores.redis_functions import FLAG, INDEX, REPLY

FIND = (
    INDEX
    + REPLY
    + f"local most, chunk = {FOUND_AT_MOST}, {4 * FOUND_AT_MOST}"
    + """
-- The newest turn of a group: its first open member, or its first closed one.
local function newest_of(members, start, stop)
    local newest, flag = turn_of(members[start]), members[start]:byte(1) + 2
    for i = start + 1, stop do
        if members[i]:byte(flag) == 48 then
            local closed = turn_of(members[i])
            return closed > newest and closed or newest
        end
    end
    return newest
end
-- Puts a group among the kept ones, the newest first; drops the last if there are too many.
local function keep(kept, group)
    local place = #kept
    while place > 0 and kept[place].newest < group.newest do
        place = place - 1
    end
    table.insert(kept, place + 1, group)
    kept[most + 1] = nil
end
-- Reads members in chunks, from the last to the first; skips the rest of a group that fills a chunk.
local function groups_of(name)
    local kept, high, members = {}, '+', nil
    repeat
        members = redis.call('ZREVRANGEBYLEX', name, high, '-', 'LIMIT', 0, chunk)
        local start, stop = 1, 0
        while start <= #members do
            local length = members[start]:byte(1) + 1
            local prefix = members[start]:sub(1, length)
            stop = start
            while stop < #members and members[stop + 1]:sub(1, length) == prefix do
                stop = stop + 1
            end
            if stop == chunk and start > 1 then
                -- it may go on in the next chunk, which begins with it
                stop = start - 1
                break
            end
            local newest, total = newest_of(members, start, stop), stop - start + 1
            if stop == chunk then
                local below, closed = '(' .. prefix .. '1', '[' .. prefix .. '0'
                total = redis.call('ZLEXCOUNT', name, closed, '(' .. prefix .. '2')
                closed = redis.call('ZREVRANGEBYLEX', name, below, closed, 'LIMIT', 0, 1)[1]
                if closed and turn_of(closed) > newest then
                    newest = turn_of(closed)
                end
            end
            if #kept < most or newest > kept[most].newest then
                local group = {prefix = prefix, total = total, newest = newest}
                group.members, group.start = members, start
                keep(kept, group)
            end
            start = stop + 1
        end
        if stop == chunk then
            high = '(' .. members[stop]:sub(1, members[stop]:byte(1) + 1)
        elseif stop > 0 then
            high = '(' .. members[stop]
        end
    until #members < chunk
    return kept
end
local found = {}
for i, key in ipairs(ARGV) do
    local name = p .. 'key:' .. key
    local total = redis.call('ZCARD', name)
    if total > 0 then
        local groups = groups_of(name)
        reply(found, i - 1, total, #groups)
        for _, group in ipairs(groups) do
            local candidates = math.min(group.total, most)
            reply(found, group.prefix:sub(2), group.newest, group.total, candidates)
            for j = group.start, group.start + candidates - 1 do
                local member = group.members[j]
                local turn = turn_of(member)
                reply(found, turn, rollout_of(turn), member:sub(#group.prefix + 1, #group.prefix + 1))
            end
        end
    end
end
return table.concat(found)
"""
)
"""Arguments: keys. Reply: for each key that finds something its index (from 0) and the numbers of turns and
groups; for each group its ids, newest turn, and the numbers of turns and candidates; for each candidate
turn, rollout, and 1 if it is open.

Turn ids are compared as the server's locale does, which for hexadecimal digits is the order of bytes."""

CLAIM = (
    INDEX
    + """
local open, entries = unpack(redis.call('HMGET', p .. 'turn:' .. ARGV[1], 'open', 'entries'))
if open ~= '1' then
    return 0
end
set_open(ARGV[1], entries, 0)
return 1
"""
)
"""Arguments: turn. Reply: 1 if it was open."""

RELEASE = (
    INDEX
    + """
local open, entries, continued =
    unpack(redis.call('HMGET', p .. 'turn:' .. ARGV[1], 'open', 'entries', 'continued'))
if open == '0' and not continued then
    set_open(ARGV[1], entries, 1)
end
"""
)
"""Arguments: turn."""

EVICTED = """
local found = {}
for i, key in ipairs(ARGV) do
    if redis.call('ZSCORE', KEYS[1] .. 'evicted', key) then
        found[#found + 1] = i - 1
    end
end
return found
"""
"""Arguments: keys. Reply: the indexes (from 0) of those that were evicted."""

HOLDS = "return redis.call('EXISTS', KEYS[1] .. 'turn:' .. ARGV[1])"
"""Arguments: turn. Reply: 1 if it is here."""

FLAG_EQUAL = (
    INDEX
    + FLAG
    + """
local rollout, found = ARGV[1], 0
for i = 2, #ARGV do
    found = math.max(found, flag_equal(p .. 'key:' .. ARGV[i], rollout))
end
return found
"""
)
"""Arguments: a rollout of another partition, keys under which it has turns with ids.
Reply: 1 if the keys find turns here. Their rollouts are ambiguous then."""

FLAG_OWN = f"{INDEX}{FLAG}flag(ARGV[1])"
"""Arguments: rollout that becomes ambiguous, if there is one."""
