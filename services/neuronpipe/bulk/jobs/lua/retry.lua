#!lua
-- id → whether the job was set aside, and now waits again.
local id, hash = arguments.id, key('job', arguments.id)
if call('ZREM', key('dead'), id) == 0 or call('EXISTS', hash) == 0 then return 0 end
local job = read(hash, 'tenant', 'priority', 'key', 'created', 'expires', 'size', 'retention')
local ttl_ms, order = job.expires - job.created, now * 1000
local expires = now + ttl_ms
call('ZREM', key('kept', job.tenant), id .. ':' .. (job.size or ''))
account(job.tenant, 0, math.ceil(ttl_ms / 1000) + job.retention)
look_again(job.tenant)
call('HDEL', hash, 'end', 'ended', 'started', 'completed', 'attempts')
call('HSET', hash, 'state', 'queued', 'order', order, 'expires', expires)
wait(id, job.priority, job.tenant, order)
call('PERSIST', hash)
call('PERSIST', key('key', job.key))
call('ZADD', key('open'), expires, id)
call('SADD', key('open', job.tenant), id)
announce('queued', id)
return 1
