#!lua flags=allow-oom
-- id, state, result → 1 if the job has ended with this result or error; 0 if it had ended before, or is gone; below 0:
-- the limit of the bytes of its tenant's jobs, which leaves no room for this result.
local id, state, result, hash = arguments.id, arguments.state, arguments.result, key('job', arguments.id)
if call('EXISTS', hash) == 0 or call('HSETNX', hash, 'end', result) == 0 then return 0 end
if state == 'succeeded' then
  local job = read(hash, 'tenant', 'size', 'reserved', 'outcomes')
  local room, outcomes = read(key('room', job.tenant), 'limit', 'mean'), tonumber(job.outcomes or 0)
  if outcomes > 0 then
    local mean = #result / outcomes
    call('HSET', key('room', job.tenant), 'mean', room.mean and (3 * room.mean + mean) / 4 or mean)
  end
  forget(job.tenant)
  local more = size_of(hash) - call('HSTRLEN', hash, 'request') - (job.size or 0) - (job.reserved or 0)
  local limit = tonumber(room.limit or 0)
  if limit > 0 and more > 0 and (call('GET', key('bytes', job.tenant)) or 0) + more > limit then
    call('HDEL', hash, 'end')
    return -limit
  end
end
leave(id, state)
if state == 'dead' then call('ZADD', key('dead'), now, id) end
return 1
