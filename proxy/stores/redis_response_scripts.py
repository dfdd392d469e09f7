"""Lua scripts that keep and drop responses. Each runs in one step of the server."""

from proxy.stores.redis_functions import PARTS

_DROP_RESPONSE = (
    PARTS
    + """
local function drop(member)
    local id, key = unpack(parts_of(member))
    local name = p .. 'responses:' .. key
    redis.call('HINCRBY', p .. 'totals', 'response_bytes', 0 - redis.call('HSTRLEN', name, id))
    redis.call('HDEL', name, id)
    redis.call('ZREM', p .. 'responses', member)
end
"""
)

KEEP_RESPONSE = (
    _DROP_RESPONSE
    + """
local member, now, packed, most = ARGV[1], ARGV[2], ARGV[3], tonumber(ARGV[4])
if redis.call('ZADD', p .. 'responses', 'NX', now, member) == 0 then
    return
end
local id, key = unpack(parts_of(member))
redis.call('HSET', p .. 'responses:' .. key, id, packed)
local left = redis.call('HINCRBY', p .. 'totals', 'response_bytes', #packed)
while left > most do
    drop(redis.call('ZRANGE', p .. 'responses', 0, 0)[1])
    left = tonumber(redis.call('HGET', p .. 'totals', 'response_bytes'))
end
"""
)
"""Arguments: packed id and key, now, packed response, bytes allowed."""

TAKE_RESPONSE = (
    _DROP_RESPONSE
    + """
if not redis.call('ZSCORE', p .. 'responses', ARGV[1]) then
    return 0
end
drop(ARGV[1])
return 1
"""
)
"""Arguments: packed id and key. Reply: 1 if it was there."""

DROP_OLD_RESPONSES = (
    _DROP_RESPONSE
    + """
local old = redis.call('ZRANGEBYSCORE', p .. 'responses', '-inf', '(' .. ARGV[1], 'LIMIT', 0, ARGV[2])
for _, member in ipairs(old) do
    drop(member)
end
return #old
"""
)
"""Arguments: time before which responses are dropped, number to drop in one step. Reply: number dropped."""
