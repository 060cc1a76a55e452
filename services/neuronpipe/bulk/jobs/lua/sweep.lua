#!lua flags=allow-oom
-- max_jobs, result (of an expired job) → number of expired jobs.
local late = call('ZRANGEBYSCORE', key('open'), '-inf', now, 'LIMIT', 0, arguments.max_jobs)
for _, id in ipairs(late) do
  if call('EXISTS', key('job', id)) == 0 then
    call('ZREM', key('open'), id)
  elseif call('HSETNX', key('job', id), 'end', arguments.result) == 1 then
    leave(id, 'expired')
  end
end
return #late
