-- The operations on jobs in Redis, each as one script: all of it happens, or nothing. A script is the first line of the
-- operation's file, with its flags, then this file, then the rest of the operation's file (store.py).
--
-- Keys, all with the prefix P:
--
--   P:waiting:high, …         sorted sets of the tenants whose jobs wait, by the order of the first job, by priority:
--                             behind all others, and by REFUSED later, the tenants without room
--   P:refused:high, …         sorted sets of the tenants without room, by the time at which `take` looks at them again
--   P:waiting:high:TENANT, …  sorted sets of a tenant's jobs that wait, by their order
--   P:waiting                 hash: the number of waiting jobs, by priority
--   P:running:high, …         sorted sets of the jobs that workers have, by the end of their leases
--   P:held:WORKER             set of the jobs that a worker has
--   P:heard                   the time at which a worker was last heard
--   P:job:ID                  hash: the job
--   P:key:KEY                 the job's id, by the digest of its tenant and its request_id
--   P:jobs:TENANT             sorted set of a tenant's jobs, by the time of their submission
--   P:bytes:TENANT            the bytes of a tenant's jobs, with the results of ended jobs, and with the bytes that are
--                             reserved for the results of running jobs
--   P:room:TENANT             hash: the limit of these bytes, and the mean of an outcome's bytes
--   P:kept:TENANT             sorted set of the ended jobs, as ID:BYTES, by the time at which Redis forgets them
--   P:open                    sorted set of the jobs that have not ended, by the end of their time to live
--   P:open:TENANT             set of a tenant's jobs that have not ended
--   P:dead                    sorted set of the jobs that were set aside, by the time
--   P:notify                  sorted set of the jobs whose receivers must be notified, by the time of the next attempt
--   P:queued, P:ended         channels: a job waits; a job has ended
--
-- The order of a job is the time of its submission in microseconds, also when the job waits again. Other times are
-- Redis's own, in milliseconds. A script with the flag allow-oom also runs while Redis is full: it ends jobs, which
-- frees more than it takes. Redis then refuses all other scripts as a whole.

-- The arguments of the operation by name. Lists and objects among them are JSON.
local arguments = {}
for place = 1, #ARGV, 2 do arguments[ARGV[place]] = ARGV[place + 1] end

-- Maximum number of jobs that a script moves.
local AT_ONCE = 1000
-- A tenant without room for the result of its first job is behind all others until its jobs or its limit change. The
-- sum of this and an order is below 2^53, up to which numbers are exact.
local REFUSED = 4 * 10 ^ 15
local PRIORITIES = {'high', 'normal', 'low'}
-- The bytes of a job besides its fields.
local JOB_BYTES = 500

local call = redis.call
local function key(...) return table.concat({arguments.prefix, ...}, ':') end
-- Some fields of a hash by their names; false for those that it does not have.
local function read(hash, ...)
  local fields, values = {}, call('HMGET', hash, ...)
  for place, name in ipairs({...}) do fields[name] = values[place] end
  return fields
end
-- A message only saves a look. A user of Redis who may not publish would otherwise be told of an operation that has
-- failed, and do again what has happened.
local function announce(channel, id) redis.pcall('PUBLISH', key(channel), id) end
local function time_us() local time = call('TIME') return time[1] * 1000000 + time[2] end
local now = math.floor(time_us() / 1000)

-- The order of tenants.
local function set_in_order(tenant, priority)
  local first_order = call('ZRANGE', key('waiting', priority, tenant), 0, 0, 'WITHSCORES')[2]
  if first_order then
    call('ZADD', key('waiting', priority), first_order, tenant)
  else
    call('ZREM', key('waiting', priority), tenant)
  end
  call('ZREM', key('refused', priority), tenant)
end
local function look_again(tenant)
  for _, priority in ipairs(PRIORITIES) do
    if call('ZSCORE', key('refused', priority), tenant) then set_in_order(tenant, priority) end
  end
end

-- The memory of tenants' jobs. A tenant's lists stay for an hour longer than any of its jobs.
local function size_of(job)
  local size = JOB_BYTES
  for _, name in ipairs(call('HKEYS', job)) do size = size + call('HSTRLEN', job, name) end
  return size
end
local function account(tenant, bytes, seconds)
  call('INCRBY', key('bytes', tenant), bytes)
  local lists = {key('jobs', tenant), key('kept', tenant), key('bytes', tenant), key('room', tenant)}
  local longest = seconds + 3600
  for _, list in ipairs(lists) do longest = math.max(longest, call('TTL', list)) end
  for _, list in ipairs(lists) do call('EXPIRE', list, longest) end
end
local function forget(tenant)
  local over = call('ZRANGEBYSCORE', key('kept', tenant), '-inf', now, 'LIMIT', 0, AT_ONCE)
  for _, entry in ipairs(over) do
    local id, size = string.match(entry, '^(.*):(%d+)$')
    call('ZREM', key('kept', tenant), entry)
    call('ZREM', key('jobs', tenant), id)
    call('DECRBY', key('bytes', tenant), size)
  end
  if over[1] then look_again(tenant) end
end

-- Waiting jobs, and jobs that workers have. A job that waits again may be taken back by the worker that had it last.
local function wait(id, priority, tenant, order)
  local jobs = key('waiting', priority, tenant)
  if call('ZADD', jobs, order, id) == 1 then call('HINCRBY', key('waiting'), priority, 1) end
  if call('ZRANGE', jobs, 0, 0)[1] == id then set_in_order(tenant, priority) end
end
local function wait_no_more(id, priority, tenant)
  if call('ZREM', key('waiting', priority, tenant), id) == 0 then return end
  call('HINCRBY', key('waiting'), priority, -1)
  set_in_order(tenant, priority)
end
local function reserve(tenant, bytes)
  call('INCRBY', key('bytes', tenant), bytes)
  call('HINCRBY', key('room', tenant), 'reserved', bytes)
end
local function hold(id, priority, worker, until_ms)
  call('ZADD', key('running', priority), until_ms, id)
  call('SADD', key('held', worker), id)
  call('HSET', key('job', id), 'state', 'running', 'holder', worker)
end
local function hold_no_more(id, priority, tenant)
  local job = read(key('job', id), 'holder', 'reserved')
  call('ZREM', key('running', priority), id)
  if job.holder then call('SREM', key('held', job.holder), id) end
  if job.reserved then
    call('HDEL', key('job', id), 'reserved')
    reserve(tenant, 0 - job.reserved)  -- a bare minus would make -0 of 0, which is no integer to Redis
    look_again(tenant)
  end
end
local function wait_again(id, priority, tenant)
  hold_no_more(id, priority, tenant)
  call('HSET', key('job', id), 'state', 'queued')
  wait(id, priority, tenant, call('HGET', key('job', id), 'order'))
end

-- If no worker was heard for a time, Redis or all workers were unavailable: then no lease ends before its worker could
-- renew it. A running worker is heard at least three times in its own lease. Other workers may have other leases.
local function hear(lease)
  local last = tonumber(call('GET', key('heard')))
  call('SET', key('heard'), now)
  if not last or now - last < math.min(lease / 2, 1500) then return end
  for _, priority in ipairs(PRIORITIES) do
    for _, id in ipairs(call('ZRANGE', key('running', priority), 0, -1)) do
      local job_lease = call('HGET', key('job', id), 'lease') or lease
      if now - last >= job_lease / 2 then call('ZADD', key('running', priority), 'XX', 'GT', now + job_lease, id) end
    end
  end
end

-- Ends a job: it waits no more, no worker has it, and nothing counts it as open.
local function leave(id, state)
  local hash = key('job', id)
  local job = read(hash, 'tenant', 'priority', 'retention', 'key', 'notify', 'size')
  wait_no_more(id, job.priority, job.tenant)
  hold_no_more(id, job.priority, job.tenant)
  call('ZREM', key('open'), id)
  call('SREM', key('open', job.tenant), id)
  call('HDEL', hash, 'holder', 'lease')
  call('HSET', hash, 'state', state, 'ended', now)
  if state ~= 'dead' then call('HDEL', hash, 'request') end
  local size = size_of(hash)
  call('HSET', hash, 'size', size)
  call('ZADD', key('kept', job.tenant), now + job.retention * 1000, id .. ':' .. size)
  account(job.tenant, size - (job.size or 0), job.retention)
  look_again(job.tenant)
  call('EXPIRE', hash, job.retention)
  call('EXPIRE', key('key', job.key), job.retention)
  if job.notify ~= '' then call('ZADD', key('notify'), now, id) end
  announce('ended', id)
end
