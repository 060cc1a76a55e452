#!lua flags=allow-oom
-- worker, jobs (list of objects with id, priority, completed) → for each job, whether it is still the worker's.
local renewals = {}
for place, renewed in ipairs(cjson.decode(arguments.jobs)) do
  local job = read(key('job', renewed.id), 'holder', 'end', 'lease', 'tenant')
  if place == 1 and job.lease and call('EXISTS', key('heard')) == 1 then hear(tonumber(job.lease)) end
  local is_mine = job.holder == arguments.worker and not job['end']
  if is_mine then
    wait_no_more(renewed.id, renewed.priority, job.tenant)
    hold(renewed.id, renewed.priority, arguments.worker, now + job.lease)
    call('HSET', key('job', renewed.id), 'completed', renewed.completed)
  end
  renewals[place] = is_mine and 1 or 0
end
return renewals
