"""What runs inside Redis, each script at once and for all. Redis tells the time, so clocks of routers do not matter.

Keys of an unexpected type count as missing and are replaced when they are written: what somebody else put there must
not stop requests. ``ttl`` is in milliseconds everywhere.
"""

from __future__ import annotations

# Of all keys of routers. The number is that of the layout: routers of two layouts may run side by side. The braces keep
# all keys in one slot of a cluster, which scripts need.
KEY_PREFIX = "{eagle2:1}:"

_NOW = """
local time = redis.call('TIME')
local now = time[1] * 1000 + math.floor(time[2] / 1000)
"""

# KEYS: leases, the session if ARGV[2] is '1', prefixes. ARGV: ttl, '1' or '0'. Returns now, the owner's value or nil,
# the leases as router, value, router, value ..., and for each prefix its holders.
LOOKUP = (
    _NOW
    + """
local owner, first = false, 2
if ARGV[2] == '1' then
  first = 3
  owner = redis.pcall('GET', KEYS[2])
  if type(owner) == 'string' then
    redis.call('PEXPIRE', KEYS[2], ARGV[1])
  else
    owner = false
  end
end
local leases = redis.pcall('HGETALL', KEYS[1])
if leases.err then leases = {} end
local holders = {}
for i = first, #KEYS do
  local found = redis.pcall('ZRANGEBYSCORE', KEYS[i], string.format('(%d', now - ARGV[1]), '+inf')
  holders[#holders + 1] = found.err and {} or found
end
return {now, owner, leases, holders}
"""
)

# KEYS: session. ARGV: ttl, candidate, whom it may replace ('' for nobody). Returns the owner's value.
CLAIM = """
local current = redis.pcall('GET', KEYS[1])
if type(current) ~= 'string' or current == ARGV[3] then
  redis.call('SET', KEYS[1], ARGV[2], 'PX', ARGV[1])
  return ARGV[2]
end
redis.call('PEXPIRE', KEYS[1], ARGV[1])
return current
"""

# KEYS: prefixes. ARGV: ttl, owner, how many owners are kept.
HOLD = (
    _NOW
    + """
for _, key in ipairs(KEYS) do
  local added = redis.pcall('ZADD', key, now, ARGV[2])
  if type(added) == 'table' and string.find(added.err, 'WRONGTYPE') then
    redis.call('DEL', key)
    added = redis.pcall('ZADD', key, now, ARGV[2])
  end
  if type(added) == 'table' then return added end
  redis.call('ZREMRANGEBYSCORE', key, '-inf', string.format('%d', now - ARGV[1]))
  redis.call('ZREMRANGEBYRANK', key, 0, -ARGV[3] - 1)
  redis.call('PEXPIRE', key, ARGV[1])
end
return redis.status_reply('OK')
"""
)

# KEYS: leases. ARGV: ttl, router, its loads. A lease's value is its end in milliseconds, a blank, and the loads.
REPORT = (
    _NOW
    + """
local leases = redis.pcall('HGETALL', KEYS[1])
if leases.err then
  redis.call('DEL', KEYS[1])
  leases = {}
end
for i = 1, #leases, 2 do
  local ends = tonumber(string.match(leases[i + 1], '^(%d+) '))
  if not ends or ends <= now then redis.call('HDEL', KEYS[1], leases[i]) end
end
redis.call('HSET', KEYS[1], ARGV[2], string.format('%d ', now + ARGV[1]) .. ARGV[3])
redis.call('PEXPIRE', KEYS[1], math.max(redis.call('PTTL', KEYS[1]), tonumber(ARGV[1])))
return redis.status_reply('OK')
"""
)
