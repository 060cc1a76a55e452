#!lua flags=allow-oom
-- id → whether the job existed. Deletes a job that has ended.
local id, job = arguments.id, read(key('job', arguments.id), 'tenant', 'key', 'ended', 'size')
if not job.ended then return 0 end
if job.size and call('ZREM', key('kept', job.tenant), id .. ':' .. job.size) == 1 then
  call('DECRBY', key('bytes', job.tenant), job.size)
  look_again(job.tenant)
end
call('DEL', key('job', id), key('key', job.key))
call('ZREM', key('jobs', job.tenant), id)
call('ZREM', key('dead'), id)
call('ZREM', key('notify'), id)
return 1
