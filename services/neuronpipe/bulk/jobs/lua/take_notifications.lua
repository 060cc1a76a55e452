#!lua flags=allow-oom
-- max_jobs, hold_ms (in which no other worker takes them), names (list, of fields) → for each job its id and the values
-- of these fields.
local jobs = {}
for _, id in ipairs(call('ZRANGEBYSCORE', key('notify'), '-inf', now, 'LIMIT', 0, arguments.max_jobs)) do
  local job = key('job', id)
  if call('EXISTS', job) == 0 then
    call('ZREM', key('notify'), id)
  else
    call('ZADD', key('notify'), now + arguments.hold_ms, id)
    call('HINCRBY', job, 'notified', 1)
    jobs[#jobs + 1] = {id, call('HMGET', job, unpack(cjson.decode(arguments.names)))}
  end
end
return jobs
