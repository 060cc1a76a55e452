#!lua flags=allow-oom
-- worker, lease_ms, max_jobs, has (list of the ids of the worker's jobs; without it they are unknown), closed (list of
-- tenants that may run no more) → whether the worker must ask again, because this operation has refused as many tenants
-- as it may; for each job: its id, the ms that are left of it, and its fields.
--
-- If Redis knows a job as the worker's, and the worker does not name it, the answer with the job was lost: the worker
-- gets it again. A job whose lease has ended waits again, unless the worker itself has it. A job whose result may find
-- no room waits until other jobs of its tenant have ended or are gone. If there are none, or it is too large anyway, it
-- runs. Tenants that may run no more at this worker may run at other workers, so they keep their places: they are read
-- in blocks.

-- Maximum numbers of tenants that are refused, and of tenants that are looked at again; each tenant after these ms at
-- the latest.
local MAX_REFUSALS, MAX_LOOKS, LOOK_AGAIN_MS = 50, 25, 60000
-- Maximum number of tenants in a block.
local MAX_BLOCK = 128
-- The bytes of an outcome whose size is unknown, and the factor by which a job's results may exceed the mean.
local OUTCOME_BYTES, SPARE = 1024, 1.25

local worker, lease, max_jobs = arguments.worker, tonumber(arguments.lease_ms), tonumber(arguments.max_jobs)
local has, closed, taken, refusals = {}, {}, {}, 0
for _, id in ipairs(cjson.decode(arguments.has or '[]')) do has[id] = true end
for _, tenant in ipairs(cjson.decode(arguments.closed)) do closed[tenant] = true end

local function hand_over(id, priority, attempts)
  local job = key('job', id)
  hold(id, priority, worker, now + lease)
  call('HSET', job, 'lease', lease)
  if has[id] then return end
  call('HSETNX', job, 'started', now)
  call('HINCRBY', job, 'attempts', attempts)
  taken[#taken + 1] = {id, call('HGET', job, 'expires') - now, call('HGETALL', job)}
end

local function reserve_room(id, tenant)
  local hash = key('job', id)
  local job, room = read(hash, 'outcomes', 'size'), read(key('room', tenant), 'limit', 'mean', 'reserved')
  local limit, result_bytes = tonumber(room.limit or 0), (job.outcomes or 0) * (room.mean or OUTCOME_BYTES) * SPARE
  -- Its request leaves Redis as its result comes.
  local more = math.floor(result_bytes) - call('HSTRLEN', hash, 'request')
  if limit == 0 or more <= 0 then return true end
  forget(tenant)
  local others = call('ZCARD', key('kept', tenant)) + (room.reserved or 0)
  local left = limit - (call('GET', key('bytes', tenant)) or 0)
  if more > left and others > 0 and job.size + more <= limit then return false end
  more = math.max(0, math.min(more, left))
  call('HSET', hash, 'reserved', more)
  reserve(tenant, more)
  return true
end

local function refuse(tenant, priority, order)
  local gone_ms = call('ZRANGE', key('kept', tenant), 0, 0, 'WITHSCORES')[2]
  call('ZADD', key('waiting', priority), order + REFUSED, tenant)
  call('ZADD', key('refused', priority), math.min(gone_ms or math.huge, now + LOOK_AGAIN_MS), tenant)
  refusals = refusals + 1
end

local function hand_over_again()
  for _, id in ipairs(call('SMEMBERS', key('held', worker))) do
    local job = read(key('job', id), 'priority', 'holder', 'end')
    if job.holder ~= worker or job['end'] then
      call('SREM', key('held', worker), id)
    elseif not has[id] and #taken < max_jobs then
      hand_over(id, job.priority, 0)
    end
  end
end

local function end_leases(priority)
  local running = key('running', priority)
  for _, id in ipairs(call('ZRANGEBYSCORE', running, '-inf', now, 'LIMIT', 0, AT_ONCE)) do
    local job = read(key('job', id), 'tenant', 'holder', 'end')
    if not job.tenant or job['end'] then
      call('ZREM', running, id)
    elseif job.holder == worker then
      call('ZADD', running, now + lease, id)
    else
      wait_again(id, priority, job.tenant)
    end
  end
end

local function take_waiting(priority)
  local waiting = key('waiting', priority)
  local block, at, size, skipped = {}, 1, 1, 0
  while #taken < max_jobs and refusals < MAX_REFUSALS do
    if at > #block then
      block, at = call('ZRANGE', waiting, skipped, skipped + size - 1), 1
      size = math.min(4 * size, MAX_BLOCK)
    end
    local tenant = block[at]
    if not tenant then break end
    at = at + 1
    if closed[tenant] then
      skipped = skipped + 1
    else
      local order = tonumber(call('ZSCORE', waiting, tenant))
      if order >= REFUSED then break end
      local id = call('ZRANGE', key('waiting', priority, tenant), 0, 0)[1]
      local job = read(key('job', id or ''), 'tenant', 'end')
      local is_open = job.tenant and not job['end']
      if is_open and not reserve_room(id, tenant) then
        refuse(tenant, priority, order)
      else
        block, size = {}, 1  -- the tenant's next job may be the oldest one
        if id then wait_no_more(id, priority, tenant) else set_in_order(tenant, priority) end
        if is_open then hand_over(id, priority, 1) else refusals = refusals + 1 end
      end
    end
  end
end

if arguments.has then
  hear(lease)
  hand_over_again()
end
for _, priority in ipairs(PRIORITIES) do
  end_leases(priority)
  local due = call('ZRANGEBYSCORE', key('refused', priority), '-inf', now, 'LIMIT', 0, MAX_LOOKS)
  for _, tenant in ipairs(due) do set_in_order(tenant, priority) end
  take_waiting(priority)
end
return {#taken < max_jobs and refusals >= MAX_REFUSALS and 1 or 0, taken}
