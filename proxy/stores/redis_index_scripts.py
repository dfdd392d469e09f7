"""Lua scripts that find turns, and make them open or not. Each runs in one step of the server."""

from proxy.history.store import FOUND_AT_MOST
from proxy.stores.redis_functions import INDEX

FIND = (
    INDEX
    + f"local most, chunk = {FOUND_AT_MOST}, {4 * FOUND_AT_MOST}"
    + """
-- The newest turn of a group: its first open member, or its first closed one.
local function newest_of(members, start, stop)
    local newest = turn_of(members[start])
    for i = start + 1, stop do
        if members[i]:byte(members[i]:byte(1) + 2) == 48 then
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
-- Reads members in chunks, from the last to the first, and skips what a chunk does not hold of a large group.
local function groups_of(name)
    local kept, high, members = {}, '+', nil
    repeat
        members = redis.call('ZREVRANGEBYLEX', name, high, '-', 'LIMIT', 0, chunk)
        local start = 1
        while start <= #members do
            local prefix = members[start]:sub(1, members[start]:byte(1) + 1)
            local stop = start
            while stop < #members and members[stop + 1]:sub(1, #prefix) == prefix do
                stop = stop + 1
            end
            if stop == chunk and start > 1 then
                high = '[' .. members[start]
                break
            end
            local group = {ids = prefix:sub(2), total = stop - start + 1, members = members, start = start}
            group.newest = newest_of(members, start, stop)
            high = '(' .. members[stop]
            if stop == chunk then
                high = '(' .. prefix
                group.total = redis.call('ZLEXCOUNT', name, '[' .. prefix, '(' .. prefix .. '2')
                local below = '(' .. prefix .. '1'
                local closed = redis.call('ZREVRANGEBYLEX', name, below, high, 'LIMIT', 0, 1)[1]
                if closed and turn_of(closed) > group.newest then
                    group.newest = turn_of(closed)
                end
            end
            keep(kept, group)
            start = stop + 1
        end
    until #members < chunk
    return kept
end
local function candidates_of(group)
    local candidates = {}
    for i = group.start, group.start + math.min(group.total, most) - 1 do
        local turn = turn_of(group.members[i])
        candidates[#candidates + 1] = {turn, rollout_of(turn), group.members[i]:byte(#group.ids + 2) - 48}
    end
    return candidates
end
local found = {}
for i, key in ipairs(ARGV) do
    local name = p .. 'key:' .. key
    local total = redis.call('ZCARD', name)
    if total > 0 then
        local groups = groups_of(name)
        for j, group in ipairs(groups) do
            groups[j] = {group.ids, group.total, candidates_of(group)}
        end
        found[#found + 1] = {i - 1, total, groups}
    end
end
return found
"""
)
"""Keys. Returns for each that finds something its number from 0, how many turns, and for each group its ids,
how many turns, and for each candidate turn, rollout, 1 or 0 for open. Turn ids are compared as the server's
locale does, which for hexadecimal digits is the order of bytes."""

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
"""turn. Returns whether it was open."""

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
"""turn."""
