#!lua flags=allow-oom
-- worker, id, priority → whether the job was the worker's. The attempt is not counted.
local id, priority, hash = arguments.id, arguments.priority, key('job', arguments.id)
local job = read(hash, 'holder', 'end', 'tenant')
if job.holder ~= arguments.worker or job['end'] then return 0 end
if not call('ZSCORE', key('running', priority), id) then return 0 end
wait_again(id, priority, job.tenant)
call('HDEL', hash, 'holder')
call('HINCRBY', hash, 'attempts', -1)
announce('queued', id)
return 1
