"""The operations on jobs in Redis, each as one Lua script: all of it happens, or nothing.

Keys, all with the prefix P (the first argument of each script):

    P:waiting:high, …         sorted sets of the tenants whose jobs wait, by the order of the first job, by priority:
                              behind all others, and by _REFUSED later, the tenants without room
    P:refused:high, …         sorted sets of the tenants without room, by the time at which TAKE looks at them again
    P:waiting:high:TENANT, …  sorted sets of a tenant's jobs that wait, by their order
    P:waiting                 hash: the number of waiting jobs, by priority
    P:running:high, …         sorted sets of the jobs that workers have, by the end of their leases
    P:held:WORKER             set of the jobs that a worker has
    P:heard                   the time at which a worker was last heard
    P:job:ID                  hash: the job
    P:key:KEY                 the job's id, by the digest of its tenant and its request_id
    P:jobs:TENANT             sorted set of a tenant's jobs, by the time of their submission
    P:bytes:TENANT            the bytes of a tenant's jobs, with the results of ended jobs, and with the bytes that
                              are reserved for the results of running jobs
    P:room:TENANT             hash: the limit of these bytes, and the mean of an outcome's bytes
    P:kept:TENANT             sorted set of the ended jobs, as ID:BYTES, by the time at which Redis forgets them
    P:open                    sorted set of the jobs that have not ended, by the end of their time to live
    P:open:TENANT             set of a tenant's jobs that have not ended
    P:dead                    sorted set of the jobs that were set aside, by the time
    P:notify                  sorted set of the jobs whose receivers must be notified, by the time of the next attempt
    P:queued, P:ended         channels: a job waits; a job has ended

The order of a job is the time of its submission in microseconds, also when the job waits again. Other times are
Redis's own, in milliseconds. A script with the flag allow-oom also runs while Redis is full: it ends jobs, which frees
more than it takes. Redis then refuses all other scripts as a whole.
"""

# The most jobs that a script moves.
_AT_ONCE = 1000
# A tenant without room for the result of its first job is behind all others until its jobs or its limit change. The sum
# of this and an order is below 2^53, up to which numbers are exact.
_REFUSED = 4 * 10**15
# The most tenants that a TAKE refuses, and the most that it looks at again. It looks at each tenant again after these
# ms at the latest.
_REFUSALS, _LOOKS_AGAIN, _LOOK_AGAIN_MS = 50, 25, 60_000
# The most tenants in a block that TAKE reads.
_BLOCK = 128
# The time, and the order of tenants, which all scripts keep.
_NOW = """
local function now_ms() local t = redis.call('TIME') return t[1] * 1000 + math.floor(t[2] / 1000) end
local p = ARGV[1]
local priorities = {'high', 'normal', 'low'}
local function set_in_order(tenant, priority)
  local list = p .. ':waiting:' .. priority
  local first = redis.call('ZRANGE', list .. ':' .. tenant, 0, 0, 'WITHSCORES')[2]
  if first then redis.call('ZADD', list, first, tenant) else redis.call('ZREM', list, tenant) end
  redis.call('ZREM', p .. ':refused:' .. priority, tenant)
end
local function look_again(tenant)
  for _, priority in ipairs(priorities) do
    if redis.call('ZSCORE', p .. ':refused:' .. priority, tenant) then set_in_order(tenant, priority) end
  end
end
"""

# The memory of tenants' jobs. A tenant's lists stay for an hour longer than any of its jobs.
_ACCOUNT = f"""
local lists = {{'jobs', 'kept', 'bytes', 'room'}}
local function size_of(job)
  local size = 500
  for _, name in ipairs(redis.call('HKEYS', job)) do size = size + redis.call('HSTRLEN', job, name) end
  return size
end
local function account(tenant, bytes, seconds)
  redis.call('INCRBY', p .. ':bytes:' .. tenant, bytes)
  local longest = seconds + 3600
  for _, list in ipairs(lists) do
    longest = math.max(longest, redis.call('TTL', p .. ':' .. list .. ':' .. tenant))
  end
  for _, list in ipairs(lists) do
    redis.call('EXPIRE', p .. ':' .. list .. ':' .. tenant, longest)
  end
end
local function forget(tenant, now)
  local kept = p .. ':kept:' .. tenant
  local over = redis.call('ZRANGEBYSCORE', kept, '-inf', now, 'LIMIT', 0, {_AT_ONCE})
  for _, entry in ipairs(over) do
    local gone, size = string.match(entry, '^(.*):(%d+)$')
    redis.call('ZREM', kept, entry)
    redis.call('ZREM', p .. ':jobs:' .. tenant, gone)
    redis.call('DECRBY', p .. ':bytes:' .. tenant, size)
  end
  if over[1] then look_again(tenant) end
end
"""

# Waiting jobs, and jobs that workers have. A job that waits again may be taken back by the worker that had it last.
_QUEUES = """
local function wait(id, priority, tenant, order)
  local list = p .. ':waiting:' .. priority
  if redis.call('ZADD', list .. ':' .. tenant, order, id) == 1 then
    redis.call('HINCRBY', p .. ':waiting', priority, 1)
  end
  if redis.call('ZRANGE', list .. ':' .. tenant, 0, 0)[1] == id then set_in_order(tenant, priority) end
end
local function wait_no_more(id, priority, tenant)
  local list = p .. ':waiting:' .. priority
  if redis.call('ZREM', list .. ':' .. tenant, id) == 0 then return false end
  redis.call('HINCRBY', p .. ':waiting', priority, -1)
  set_in_order(tenant, priority)
  return true
end
local function reserve(tenant, bytes)
  redis.call('INCRBY', p .. ':bytes:' .. tenant, bytes)
  redis.call('HINCRBY', p .. ':room:' .. tenant, 'reserved', bytes)
end
local function hold(id, priority, worker, until_ms)
  redis.call('ZADD', p .. ':running:' .. priority, until_ms, id)
  redis.call('SADD', p .. ':held:' .. worker, id)
  redis.call('HSET', p .. ':job:' .. id, 'state', 'running', 'holder', worker)
end
local function hold_no_more(id, priority, tenant)
  local f = redis.call('HMGET', p .. ':job:' .. id, 'holder', 'reserved')
  redis.call('ZREM', p .. ':running:' .. priority, id)
  if f[1] then redis.call('SREM', p .. ':held:' .. f[1], id) end
  if f[2] then
    redis.call('HDEL', p .. ':job:' .. id, 'reserved')
    reserve(tenant, 0 - f[2])  -- where it is 0, -f[2] is -0, which is no integer to Redis
    look_again(tenant)
  end
end
local function wait_again(id, priority, tenant)
  hold_no_more(id, priority, tenant)
  redis.call('HSET', p .. ':job:' .. id, 'state', 'queued')
  wait(id, priority, tenant, redis.call('HGET', p .. ':job:' .. id, 'order'))
end
"""

# If no worker was heard for a time, Redis or all workers were unavailable: then no lease ends before its worker could
# renew it. A running worker is heard at least three times in its own lease. Other workers may have other leases.
_HEAR = """
local function hear(lease, now)
  local last = tonumber(redis.call('GET', p .. ':heard'))
  redis.call('SET', p .. ':heard', now)
  if not last or now - last < math.min(lease / 2, 1500) then return end
  for _, priority in ipairs(priorities) do
    for _, id in ipairs(redis.call('ZRANGE', p .. ':running:' .. priority, 0, -1)) do
      local own = redis.call('HGET', p .. ':job:' .. id, 'lease') or lease
      if now - last >= own / 2 then redis.call('ZADD', p .. ':running:' .. priority, 'XX', 'GT', now + own, id) end
    end
  end
end
"""

# The job waits no more, no worker has it, and nothing counts it as open.
_LEAVE = f"""{_ACCOUNT}{_QUEUES}
local function leave(id, state, ended)
  local job = p .. ':job:' .. id
  local f = redis.call('HMGET', job, 'tenant', 'priority', 'retention', 'key', 'notify', 'size')
  wait_no_more(id, f[2], f[1])
  hold_no_more(id, f[2], f[1])
  redis.call('ZREM', p .. ':open', id)
  redis.call('SREM', p .. ':open:' .. f[1], id)
  redis.call('HDEL', job, 'holder', 'lease')
  redis.call('HSET', job, 'state', state, 'ended', ended)
  if state ~= 'dead' then redis.call('HDEL', job, 'request') end
  local size = size_of(job)
  redis.call('HSET', job, 'size', size)
  redis.call('ZADD', p .. ':kept:' .. f[1], ended + f[3] * 1000, id .. ':' .. size)
  account(f[1], size - (f[6] or 0), f[3])
  look_again(f[1])
  redis.call('EXPIRE', job, f[3])
  redis.call('EXPIRE', p .. ':key:' .. f[4], f[3])
  if f[5] ~= '' then redis.call('ZADD', p .. ':notify', ended, id) end
  redis.call('PUBLISH', p .. ':ended', id)
end
"""

# id, key, digest, priority, tenant, request, time to live (ms), retention (s), most open jobs, most of the tenant and
# most bytes of its jobs (0: no limit), then fields of the hash → the id and the digest of the stored job; or an empty
# id and the limit that was reached.
SUBMIT = f"""#!lua
{_NOW}{_ACCOUNT}{_QUEUES}
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
forget(tenant, now)
local size = 500 + #request
for i = 13, #ARGV do size = size + #ARGV[i] end
local limit = tonumber(ARGV[12])
if limit > 0 and (redis.call('GET', p .. ':bytes:' .. tenant) or 0) + size > limit then
  return {{'', 'bytes'}}
end
local expires = now + ARGV[8]
local time = redis.call('TIME')
local order = time[1] * 1000000 + time[2]
redis.call('HSET', p .. ':job:' .. id, 'tenant', tenant, 'priority', priority, 'order', order, 'key', key,
  'digest', digest, 'request', request, 'state', 'queued', 'created', now, 'expires', expires, 'retention', ARGV[9],
  'size', size, unpack(ARGV, 13))
wait(id, priority, tenant, order)
redis.call('SET', p .. ':key:' .. key, id)
redis.call('ZADD', p .. ':jobs:' .. tenant, now, id)
redis.call('ZADD', p .. ':open', expires, id)
redis.call('SADD', p .. ':open:' .. tenant, id)
if redis.call('HGET', p .. ':room:' .. tenant, 'limit') ~= ARGV[12] then
  redis.call('HSET', p .. ':room:' .. tenant, 'limit', limit)
  look_again(tenant)
end
account(tenant, size, seconds)
redis.call('PUBLISH', p .. ':queued', id)
return {{id, digest}}
"""

# The bytes of an outcome whose size is unknown, and the factor by which a job's results may exceed the mean.
_OUTCOME_BYTES, _SPARE = 1024, 1.25
# worker, lease (ms), most jobs to take, number of jobs that the worker has (-1: unknown), their ids, then tenants that
# may run no more → whether the worker must ask again, because this TAKE has refused as many tenants as it may; for each
# job: its id, the ms that are left of it, and its fields.
#
# If Redis knows a job as the worker's, and the worker does not name it, the answer with the job was lost: the worker
# gets it again. A job whose lease has ended waits again, unless the worker itself has it. A job whose result may find
# no room waits until other jobs of its tenant have ended or are gone. If there are none, or it is too large anyway, it
# runs. Tenants that may run no more at this worker may run at other workers, so they keep their places: TAKE reads them
# in blocks.
TAKE = f"""#!lua flags=allow-oom
{_NOW}{_ACCOUNT}{_QUEUES}{_HEAR}
local me, lease, wanted, held = ARGV[2], tonumber(ARGV[3]), tonumber(ARGV[4]), tonumber(ARGV[5])
local now, has, closed, taken, refusals = now_ms(), {{}}, {{}}, {{}}, 0
for i = 6, #ARGV do
  if i <= 5 + held then has[ARGV[i]] = true else closed[ARGV[i]] = true end
end
local function hand_over(id, priority, attempts)
  local job = p .. ':job:' .. id
  hold(id, priority, me, now + lease)
  redis.call('HSET', job, 'lease', lease)
  if has[id] then return end
  redis.call('HSETNX', job, 'started', now)
  redis.call('HINCRBY', job, 'attempts', attempts)
  taken[#taken + 1] = {{id, redis.call('HGET', job, 'expires') - now, redis.call('HGETALL', job)}}
end
local function reserve_room(id, tenant)
  local job, room = p .. ':job:' .. id, p .. ':room:' .. tenant
  local f, known = redis.call('HMGET', job, 'outcomes', 'size'), redis.call('HMGET', room, 'limit', 'mean', 'reserved')
  local limit, result = tonumber(known[1] or 0), (f[1] or 0) * (known[2] or {_OUTCOME_BYTES}) * {_SPARE}
  -- Its request leaves Redis as its result comes.
  local more = math.floor(result) - redis.call('HSTRLEN', job, 'request')
  if limit == 0 or more <= 0 then return true end
  forget(tenant, now)
  local others = redis.call('ZCARD', p .. ':kept:' .. tenant) + (known[3] or 0)
  local left = limit - (redis.call('GET', p .. ':bytes:' .. tenant) or 0)
  if more > left and others > 0 and f[2] + more <= limit then return false end
  more = math.max(0, math.min(more, left))
  redis.call('HSET', job, 'reserved', more)
  reserve(tenant, more)
  return true
end
local function refuse(tenant, priority, order)
  local gone_ms = redis.call('ZRANGE', p .. ':kept:' .. tenant, 0, 0, 'WITHSCORES')[2]
  redis.call('ZADD', p .. ':waiting:' .. priority, order + {_REFUSED}, tenant)
  local again_ms = math.min(gone_ms or math.huge, now + {_LOOK_AGAIN_MS})
  redis.call('ZADD', p .. ':refused:' .. priority, again_ms, tenant)
  refusals = refusals + 1
end
if held >= 0 then
  hear(lease, now)
  for _, id in ipairs(redis.call('SMEMBERS', p .. ':held:' .. me)) do
    local f = redis.call('HMGET', p .. ':job:' .. id, 'priority', 'holder', 'end')
    if f[2] ~= me or f[3] then
      redis.call('SREM', p .. ':held:' .. me, id)
    elseif not has[id] and #taken < wanted then
      hand_over(id, f[1], 0)
    end
  end
end
for _, priority in ipairs(priorities) do
  local running, waiting = p .. ':running:' .. priority, p .. ':waiting:' .. priority
  for _, id in ipairs(redis.call('ZRANGEBYSCORE', running, '-inf', now, 'LIMIT', 0, {_AT_ONCE})) do
    local f = redis.call('HMGET', p .. ':job:' .. id, 'tenant', 'holder', 'end')
    if not f[1] or f[3] then
      redis.call('ZREM', running, id)
    elseif f[2] == me then
      redis.call('ZADD', running, now + lease, id)
    else
      wait_again(id, priority, f[1])
    end
  end
  local due = redis.call('ZRANGEBYSCORE', p .. ':refused:' .. priority, '-inf', now, 'LIMIT', 0, {_LOOKS_AGAIN})
  for _, tenant in ipairs(due) do set_in_order(tenant, priority) end
  local block, at, size, skipped = {{}}, 1, 1, 0
  while #taken < wanted and refusals < {_REFUSALS} do
    if at > #block then
      block, at = redis.call('ZRANGE', waiting, skipped, skipped + size - 1), 1
      size = math.min(4 * size, {_BLOCK})
    end
    local tenant = block[at]
    if not tenant then break end
    at = at + 1
    if closed[tenant] then
      skipped = skipped + 1
    else
      local order = tonumber(redis.call('ZSCORE', waiting, tenant))
      if order >= {_REFUSED} then break end
      local id = redis.call('ZRANGE', waiting .. ':' .. tenant, 0, 0)[1]
      local f = redis.call('HMGET', p .. ':job:' .. (id or ''), 'tenant', 'end')
      local is_open = f[1] and not f[2]
      if is_open and not reserve_room(id, tenant) then
        refuse(tenant, priority, order)
      else
        block, size = {{}}, 1  -- the tenant's next job may be the oldest one
        if id then wait_no_more(id, priority, tenant) else set_in_order(tenant, priority) end
        if is_open then hand_over(id, priority, 1) else refusals = refusals + 1 end
      end
    end
  end
end
return {{#taken < wanted and refusals >= {_REFUSALS} and 1 or 0, taken}}
"""

# worker, then for each job its id, its priority and its completed inputs → for each job, whether it is still the
# worker's.
RENEW = f"""#!lua flags=allow-oom
{_NOW}{_QUEUES}{_HEAR}
local mine, now = {{}}, now_ms()
for i = 3, #ARGV, 3 do
  local id, priority, job = ARGV[i], ARGV[i + 1], p .. ':job:' .. ARGV[i]
  local f = redis.call('HMGET', job, 'holder', 'end', 'lease', 'tenant')
  if i == 3 and f[3] and redis.call('EXISTS', p .. ':heard') == 1 then hear(tonumber(f[3]), now) end
  local is_mine = f[1] == ARGV[2] and not f[2]
  if is_mine then
    wait_no_more(id, priority, f[4])
    hold(id, priority, ARGV[2], now + f[3])
    redis.call('HSET', job, 'completed', ARGV[i + 2])
  end
  mine[#mine + 1] = is_mine and 1 or 0
end
return mine
"""

# worker, id, priority → whether the job was the worker's. The attempt is not counted.
GIVE_BACK = f"""#!lua flags=allow-oom
{_NOW}{_QUEUES}
local id, job = ARGV[3], p .. ':job:' .. ARGV[3]
local f = redis.call('HMGET', job, 'holder', 'end', 'tenant')
if f[1] ~= ARGV[2] or f[2] then return 0 end
if not redis.call('ZSCORE', p .. ':running:' .. ARGV[4], id) then return 0 end
wait_again(id, ARGV[4], f[3])
redis.call('HDEL', job, 'holder')
redis.call('HINCRBY', job, 'attempts', -1)
redis.call('PUBLISH', p .. ':queued', id)
return 1
"""

# id, state, end → 1 if the job has ended with this end; 0 if it had ended before, or is gone; below 0: the limit of the
# bytes of its tenant's jobs, which leaves no room for this result.
END = f"""#!lua flags=allow-oom
{_NOW}{_LEAVE}
local id, job = ARGV[2], p .. ':job:' .. ARGV[2]
if redis.call('EXISTS', job) == 0 then return 0 end
if redis.call('HSETNX', job, 'end', ARGV[4]) == 0 then return 0 end
local now = now_ms()
if ARGV[3] == 'succeeded' then
  local f = redis.call('HMGET', job, 'tenant', 'size', 'reserved', 'outcomes')
  local account, room = p .. ':bytes:' .. f[1], p .. ':room:' .. f[1]
  local known, outcomes = redis.call('HMGET', room, 'limit', 'mean'), tonumber(f[4] or 0)
  if outcomes > 0 then
    local mean = #ARGV[4] / outcomes
    redis.call('HSET', room, 'mean', known[2] and (3 * known[2] + mean) / 4 or mean)
  end
  forget(f[1], now)
  local more = size_of(job) - redis.call('HSTRLEN', job, 'request') - (f[2] or 0) - (f[3] or 0)
  local limit = tonumber(known[1] or 0)
  if limit > 0 and more > 0 and (redis.call('GET', account) or 0) + more > limit then
    redis.call('HDEL', job, 'end')
    return -limit
  end
end
leave(id, ARGV[3], now)
if ARGV[3] == 'dead' then redis.call('ZADD', p .. ':dead', now, id) end
return 1
"""

# most jobs, the end of an expired job → number of expired jobs.
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
return #late
"""

# id → whether the job existed. Deletes a job that has ended.
DELETE = f"""#!lua flags=allow-oom
{_NOW}
local job = p .. ':job:' .. ARGV[2]
local f = redis.call('HMGET', job, 'tenant', 'key', 'ended', 'size')
if not f[3] then return 0 end
if f[4] and redis.call('ZREM', p .. ':kept:' .. f[1], ARGV[2] .. ':' .. f[4]) == 1 then
  redis.call('DECRBY', p .. ':bytes:' .. f[1], f[4])
  look_again(f[1])
end
redis.call('DEL', job, p .. ':key:' .. f[2])
redis.call('ZREM', p .. ':jobs:' .. f[1], ARGV[2])
redis.call('ZREM', p .. ':dead', ARGV[2])
redis.call('ZREM', p .. ':notify', ARGV[2])
return 1
"""

# id → whether the job was set aside, and now waits again.
RETRY = f"""#!lua
{_NOW}{_ACCOUNT}{_QUEUES}
local id, job = ARGV[2], p .. ':job:' .. ARGV[2]
if redis.call('ZREM', p .. ':dead', id) == 0 or redis.call('EXISTS', job) == 0 then return 0 end
local f = redis.call('HMGET', job, 'tenant', 'priority', 'key', 'created', 'expires', 'size', 'retention')
local expires = now_ms() + f[5] - f[4]
redis.call('ZREM', p .. ':kept:' .. f[1], id .. ':' .. (f[6] or ''))
account(f[1], 0, math.ceil((f[5] - f[4]) / 1000) + f[7])
look_again(f[1])
local order = now_ms() * 1000
redis.call('HDEL', job, 'end', 'ended', 'started', 'completed', 'attempts')
redis.call('HSET', job, 'state', 'queued', 'order', order, 'expires', expires)
wait(id, f[2], f[1], order)
redis.call('PERSIST', job)
redis.call('PERSIST', p .. ':key:' .. f[3])
redis.call('ZADD', p .. ':open', expires, id)
redis.call('SADD', p .. ':open:' .. f[1], id)
redis.call('PUBLISH', p .. ':queued', id)
return 1
"""

# most jobs, ms in which no other worker takes them, names of fields → for each job its id and the values of these
# fields.
TAKE_NOTIFICATIONS = f"""#!lua flags=allow-oom
{_NOW}
local now, jobs = now_ms(), {{}}
for _, id in ipairs(redis.call('ZRANGEBYSCORE', p .. ':notify', '-inf', now, 'LIMIT', 0, ARGV[2])) do
  local job = p .. ':job:' .. id
  if redis.call('EXISTS', job) == 0 then
    redis.call('ZREM', p .. ':notify', id)
  else
    redis.call('ZADD', p .. ':notify', now + ARGV[3], id)
    redis.call('HINCRBY', job, 'notified', 1)
    jobs[#jobs + 1] = {{id, redis.call('HMGET', job, unpack(ARGV, 4))}}
  end
end
return jobs
"""

# id, ms until the next attempt, number of attempts that do not count → nothing.
POSTPONE_NOTIFICATION = f"""#!lua flags=allow-oom
{_NOW}
if redis.call('ZSCORE', p .. ':notify', ARGV[2]) then
  redis.call('ZADD', p .. ':notify', now_ms() + ARGV[3], ARGV[2])
  if ARGV[4] ~= '0' then redis.call('HINCRBY', p .. ':job:' .. ARGV[2], 'notified', -ARGV[4]) end
end
"""

# → for each priority: waiting jobs, running jobs, ms for which the first job has waited; then jobs that were set aside.
COUNT = f"""#!lua flags=allow-oom
{_NOW}
local counts = {{}}
for _, priority in ipairs(priorities) do
  local list = p .. ':waiting:' .. priority
  local first = redis.call('ZRANGE', list, 0, 0, 'WITHSCORES')[2]
  local refused = redis.call('ZRANGEBYSCORE', list, {_REFUSED}, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  local waiting = tonumber(redis.call('HGET', p .. ':waiting', priority) or 0)
  local oldest = first and math.min(first % {_REFUSED}, (refused or first) % {_REFUSED})
  local age = first and math.max(0, now_ms() - math.floor(oldest / 1000)) or 0
  counts[#counts + 1] = {{waiting, redis.call('ZCARD', p .. ':running:' .. priority), age}}
end
counts[#counts + 1] = redis.call('ZCARD', p .. ':dead')
counts[#counts + 1] = redis.call('ZCARD', p .. ':notify')
return counts
"""
