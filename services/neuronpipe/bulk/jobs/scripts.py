"""What happens to jobs in Redis, each as one Lua script: all of it happens, or nothing.

Keys, all with the prefix P (the first argument of each script):

    P:high, P:normal, P:low   streams of jobs that wait or run, each with the consumer group `workers`
    P:high:later, …           sorted sets of those that wait, by the time from which their tenants may run more
    P:job:ID                  hash: the job
    P:key:KEY                 the job's id, by the digest of its tenant and its request_id
    P:jobs:TENANT             sorted set of a tenant's jobs, by the time of their submission
    P:bytes:TENANT            the bytes of a tenant's jobs, with the results of those that have ended
    P:kept:TENANT             sorted set of the ended ones, as ID:BYTES, by the time at which Redis forgets them
    P:open, P:open:TENANT     sorted set of the jobs that have not ended, by the end of their time to live; a tenant's
    P:dead                    sorted set of the jobs that were set aside, by the time
    P:notify                  sorted set of the jobs whose receivers must be told, by the time of the next attempt
    P:queued, P:ended         channels: a job waits; a job has ended

Times are Redis's own, in milliseconds. A script with the flag allow-oom also runs while Redis is full: it ends jobs,
which frees more than it takes. All others are refused then as a whole.
"""

# Jobs that one script moves at most.
_AT_ONCE = 1000
_NOW = """
local function now_ms() local t = redis.call('TIME') return t[1] * 1000 + math.floor(t[2] / 1000) end
local p = ARGV[1]
"""

# What tenants' jobs take of the memory. Their lists stay for an hour longer than any job, all of a tenant alike.
_ACCOUNT = """
local function size_of(job)
  local size = 500
  for _, value in ipairs(redis.call('HVALS', job)) do size = size + #value end
  return size
end
local function account(tenant, bytes, seconds)
  redis.call('INCRBY', p .. ':bytes:' .. tenant, bytes)
  local longest = seconds + 3600
  for _, list in ipairs({'jobs', 'kept', 'bytes'}) do
    longest = math.max(longest, redis.call('TTL', p .. ':' .. list .. ':' .. tenant))
  end
  for _, list in ipairs({'jobs', 'kept', 'bytes'}) do
    redis.call('EXPIRE', p .. ':' .. list .. ':' .. tenant, longest)
  end
end
"""

# A job is gone from its stream, and from what counts open jobs.
_LEAVE = f"""{_ACCOUNT}
local function leave(id, state, ended)
  local job = p .. ':job:' .. id
  local f = redis.call('HMGET', job, 'tenant', 'priority', 'entry', 'retention', 'key', 'notify', 'size')
  redis.call('XACK', p .. ':' .. f[2], 'workers', f[3])
  redis.call('XDEL', p .. ':' .. f[2], f[3])
  redis.call('ZREM', p .. ':' .. f[2] .. ':later', id)
  redis.call('ZREM', p .. ':open', id)
  redis.call('SREM', p .. ':open:' .. f[1], id)
  redis.call('HSET', job, 'state', state, 'ended', ended)
  if state ~= 'dead' then redis.call('HDEL', job, 'request') end
  local size = size_of(job)
  redis.call('HSET', job, 'size', size)
  redis.call('ZADD', p .. ':kept:' .. f[1], ended + f[4] * 1000, id .. ':' .. size)
  account(f[1], size - (f[7] or 0), f[4])
  redis.call('EXPIRE', job, f[4])
  redis.call('EXPIRE', p .. ':key:' .. f[5], f[4])
  if f[6] ~= '' then redis.call('ZADD', p .. ':notify', ended, id) end
  redis.call('PUBLISH', p .. ':ended', id)
end
"""

# id, key, digest, priority, tenant, request, time to live (ms), retention (s), most open jobs, most of the tenant and
# most bytes of its jobs (0: no limit), then fields of the hash → the id and the digest of the job that is there; or an
# empty id and which limit.
SUBMIT = f"""#!lua
{_NOW}{_ACCOUNT}
local id, key, digest, priority, tenant, request = ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6], ARGV[7]
local known = redis.call('GET', p .. ':key:' .. key)
if known then
  local other = redis.call('HGET', p .. ':job:' .. known, 'digest')
  if other then return {{known, other}} end
end
if redis.call('ZCARD', p .. ':open') >= tonumber(ARGV[10]) then return {{'', 'all'}} end
if tonumber(ARGV[11]) > 0 and redis.call('SCARD', p .. ':open:' .. tenant) >= tonumber(ARGV[11]) then
  return {{'', 'tenant'}}
end
local now, seconds = now_ms(), math.ceil(ARGV[8] / 1000) + ARGV[9]
for _, one in ipairs(redis.call('ZRANGEBYSCORE', p .. ':kept:' .. tenant, '-inf', now, 'LIMIT', 0, {_AT_ONCE})) do
  local gone, size = string.match(one, '^(.*):(%d+)$')
  redis.call('ZREM', p .. ':kept:' .. tenant, one)
  redis.call('ZREM', p .. ':jobs:' .. tenant, gone)
  redis.call('DECRBY', p .. ':bytes:' .. tenant, size)
end
local size = 500 + #request
for i = 13, #ARGV do size = size + #ARGV[i] end
if tonumber(ARGV[12]) > 0 and (redis.call('GET', p .. ':bytes:' .. tenant) or 0) + size > tonumber(ARGV[12]) then
  return {{'', 'bytes'}}
end
local expires = now + ARGV[8]
local entry = redis.call('XADD', p .. ':' .. priority, '*', 'id', id)
redis.call('HSET', p .. ':job:' .. id, 'tenant', tenant, 'priority', priority, 'entry', entry, 'key', key,
  'digest', digest, 'request', request, 'state', 'queued', 'created', now, 'expires', expires, 'retention', ARGV[9],
  'size', size, unpack(ARGV, 13))
redis.call('SET', p .. ':key:' .. key, id)
redis.call('ZADD', p .. ':jobs:' .. tenant, now, id)
redis.call('ZADD', p .. ':open', expires, id)
redis.call('SADD', p .. ':open:' .. tenant, id)
account(tenant, size, seconds)
redis.call('PUBLISH', p .. ':queued', id)
return {{id, digest}}
"""

# worker, lease (ms), how many, then tenants whose jobs are put off, each with the ms → of each job: its id, its entry,
# how often it was delivered, the ms that are left of it, and its fields.
TAKE = f"""#!lua flags=allow-oom
{_NOW}
local me, wanted = ARGV[2], tonumber(ARGV[4])
local closed = {{}}
for i = 5, #ARGV, 2 do closed[ARGV[i]] = ARGV[i + 1] end
local found = {{}}
local function resume(stream)
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', stream .. ':later', '-inf', now_ms(), 'LIMIT', 0, {_AT_ONCE})) do
    redis.call('ZREM', stream .. ':later', id)
    if redis.call('EXISTS', p .. ':job:' .. id) == 1 then
      redis.call('HSET', p .. ':job:' .. id, 'entry', redis.call('XADD', stream, '*', 'id', id))
    end
  end
end
local function add(stream, entries, is_new)
  for _, entry in ipairs(entries) do
    local id = entry[2][2]
    local job = p .. ':job:' .. id
    local tenant = redis.call('HGET', job, 'tenant')
    local later = is_new and closed[tenant]
    if later or not tenant then
      redis.call('XACK', stream, 'workers', entry[1])
      redis.call('XDEL', stream, entry[1])
      if later then redis.call('ZADD', stream .. ':later', now_ms() + later, id) end
    else
      local deliveries = 1
      if not is_new then deliveries = redis.call('XPENDING', stream, 'workers', entry[1], entry[1], 1)[1][4] end
      redis.call('HSETNX', job, 'started', now_ms())
      redis.call('HSET', job, 'state', 'running', 'attempts', deliveries)
      local left = redis.call('HGET', job, 'expires') - now_ms()
      found[#found + 1] = {{id, entry[1], deliveries, left, redis.call('HGETALL', job)}}
    end
  end
end
for _, priority in ipairs({{'high', 'normal', 'low'}}) do
  local stream = p .. ':' .. priority
  if #found < wanted then
    local claimed = redis.call('XAUTOCLAIM', stream, 'workers', me, ARGV[3], '0-0', 'COUNT', wanted - #found)
    add(stream, claimed[2], false)
  end
  resume(stream)
  for _ = 1, {_AT_ONCE} do
    if #found >= wanted then break end
    local read = redis.call('XREADGROUP', 'GROUP', 'workers', me, 'COUNT', wanted - #found, 'STREAMS', stream, '>')
    if not read then break end
    add(stream, read[1][2], true)
  end
end
return found
"""

# worker, then of each job its id, its priority, its entry and its completed inputs → of each, whether it is still the
# worker's.
RENEW = f"""#!lua flags=allow-oom
{_NOW}
local mine = {{}}
for i = 3, #ARGV, 4 do
  local stream, entry = p .. ':' .. ARGV[i + 1], ARGV[i + 2]
  local pending = redis.call('XPENDING', stream, 'workers', entry, entry, 1)
  local is_mine = #pending == 1 and pending[1][2] == ARGV[2]
  if is_mine then
    is_mine = #redis.call('XCLAIM', stream, 'workers', ARGV[2], 0, entry, 'JUSTID') == 1
    redis.call('HSET', p .. ':job:' .. ARGV[i], 'completed', ARGV[i + 3])
  end
  mine[#mine + 1] = is_mine and 1 or 0
end
return mine
"""

# worker, id, priority, entry → whether it was the worker's. Whoever takes it next has it as often delivered as now.
GIVE_BACK = f"""#!lua flags=allow-oom
{_NOW}
local stream, entry = p .. ':' .. ARGV[4], ARGV[5]
local pending = redis.call('XPENDING', stream, 'workers', entry, entry, 1)
if #pending == 0 or pending[1][2] ~= ARGV[2] then return 0 end
redis.call('XCLAIM', stream, 'workers', 'nobody', 0, entry, 'IDLE', 86400000, 'RETRYCOUNT', pending[1][4] - 1, 'JUSTID')
redis.call('HSET', p .. ':job:' .. ARGV[3], 'state', 'queued')
redis.call('PUBLISH', p .. ':queued', ARGV[3])
return 1
"""

# id, state, end → 1 where this is how it ended; 0 where it had ended before, or is gone.
END = f"""#!lua flags=allow-oom
{_NOW}{_LEAVE}
local id, job = ARGV[2], p .. ':job:' .. ARGV[2]
if redis.call('EXISTS', job) == 0 then return 0 end
if redis.call('HSETNX', job, 'end', ARGV[4]) == 0 then return 0 end
local now = now_ms()
leave(id, ARGV[3], now)
if ARGV[3] == 'dead' then redis.call('ZADD', p .. ':dead', now, id) end
return 1
"""

# how many, the end of an expired job → how many have expired. Also forgets workers that are gone.
SWEEP = f"""#!lua flags=allow-oom
{_NOW}{_LEAVE}
local now = now_ms()
local late = redis.call('ZRANGEBYSCORE', p .. ':open', '-inf', now, 'LIMIT', 0, ARGV[2])
for _, id in ipairs(late) do
  if redis.call('EXISTS', p .. ':job:' .. id) == 0 then
    redis.call('ZREM', p .. ':open', id)
  elseif redis.call('HSETNX', p .. ':job:' .. id, 'end', ARGV[3]) == 1 then
    leave(id, 'expired', now)
  end
end
for _, priority in ipairs({{'high', 'normal', 'low'}}) do
  for _, consumer in ipairs(redis.call('XINFO', 'CONSUMERS', p .. ':' .. priority, 'workers')) do
    if consumer[4] == 0 and consumer[6] > 3600000 then
      redis.call('XGROUP', 'DELCONSUMER', p .. ':' .. priority, 'workers', consumer[2])
    end
  end
end
return #late
"""

# id → whether there was one. Deletes a job that has ended.
DELETE = f"""#!lua flags=allow-oom
{_NOW}
local job = p .. ':job:' .. ARGV[2]
local f = redis.call('HMGET', job, 'tenant', 'key', 'ended', 'size')
if not f[3] then return 0 end
if f[4] and redis.call('ZREM', p .. ':kept:' .. f[1], ARGV[2] .. ':' .. f[4]) == 1 then
  redis.call('DECRBY', p .. ':bytes:' .. f[1], f[4])
end
redis.call('DEL', job, p .. ':key:' .. f[2])
redis.call('ZREM', p .. ':jobs:' .. f[1], ARGV[2])
redis.call('ZREM', p .. ':dead', ARGV[2])
redis.call('ZREM', p .. ':notify', ARGV[2])
return 1
"""

# id → whether it was set aside, and waits again now.
RETRY = f"""#!lua
{_NOW}{_ACCOUNT}
local id, job = ARGV[2], p .. ':job:' .. ARGV[2]
if redis.call('ZREM', p .. ':dead', id) == 0 or redis.call('EXISTS', job) == 0 then return 0 end
local f = redis.call('HMGET', job, 'tenant', 'priority', 'key', 'created', 'expires', 'size', 'retention')
local expires = now_ms() + f[5] - f[4]
redis.call('ZREM', p .. ':kept:' .. f[1], id .. ':' .. (f[6] or ''))
account(f[1], 0, math.ceil((f[5] - f[4]) / 1000) + f[7])
local entry = redis.call('XADD', p .. ':' .. f[2], '*', 'id', id)
redis.call('HDEL', job, 'end', 'ended', 'started', 'completed')
redis.call('HSET', job, 'state', 'queued', 'entry', entry, 'expires', expires)
redis.call('PERSIST', job)
redis.call('PERSIST', p .. ':key:' .. f[3])
redis.call('ZADD', p .. ':open', expires, id)
redis.call('SADD', p .. ':open:' .. f[1], id)
redis.call('PUBLISH', p .. ':queued', id)
return 1
"""

# how many, ms in which nobody else takes them → of each its id and fields.
TAKE_NOTIFICATIONS = f"""#!lua flags=allow-oom
{_NOW}
local now, found = now_ms(), {{}}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. ':notify', '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local job = p .. ':job:' .. id
  if redis.call('EXISTS', job) == 0 then
    redis.call('ZREM', p .. ':notify', id)
  else
    redis.call('ZADD', p .. ':notify', now + ARGV[3], id)
    redis.call('HINCRBY', job, 'notified', 1)
    found[#found + 1] = {{id, redis.call('HGETALL', job)}}
  end
end
return found
"""

# id, ms until the next attempt → nothing.
POSTPONE_NOTIFICATION = f"""#!lua flags=allow-oom
{_NOW}
if redis.call('ZSCORE', p .. ':notify', ARGV[2]) then
  redis.call('ZADD', p .. ':notify', now_ms() + ARGV[3], ARGV[2])
end
"""

# → of each priority: jobs that wait, jobs that run, ms for which the first one waits; then jobs that were set aside.
COUNT = f"""#!lua flags=allow-oom
{_NOW}
local counts = {{}}
for _, priority in ipairs({{'high', 'normal', 'low'}}) do
  local stream = p .. ':' .. priority
  local running = redis.call('XPENDING', stream, 'workers')[1]
  local last = '0-0'
  for _, group in ipairs(redis.call('XINFO', 'GROUPS', stream)) do
    if group[2] == 'workers' then last = group[8] end
  end
  local first, age = redis.call('XRANGE', stream, '(' .. last, '+', 'COUNT', 1)[1], 0
  if first then age = now_ms() - string.match(first[1], '^%d+') end
  local waiting = redis.call('XLEN', stream) - running + redis.call('ZCARD', stream .. ':later')
  counts[#counts + 1] = {{waiting, running, age}}
end
counts[#counts + 1] = redis.call('ZCARD', p .. ':dead')
counts[#counts + 1] = redis.call('ZCARD', p .. ':notify')
return counts
"""
