#!lua
-- id, key, digest, priority, tenant, request, ttl_ms, retention_s, max_open (jobs of all tenants), max_of_tenant (open
-- jobs) and max_bytes (of the tenant's jobs; 0 for no limit), fields (object, of the hash) → the id and the digest of
-- the stored job; or an empty id and the limit that was reached.
local id, tenant, digest, ttl_ms = arguments.id, arguments.tenant, arguments.digest, arguments.ttl_ms
local stored_id = call('GET', key('key', arguments.key))
if stored_id then
  local stored_digest = call('HGET', key('job', stored_id), 'digest')
  if stored_digest then return {stored_id, stored_digest} end
end
local max_of_tenant, max_bytes = tonumber(arguments.max_of_tenant), tonumber(arguments.max_bytes)
if call('ZCARD', key('open')) >= tonumber(arguments.max_open) then return {'', 'all'} end
if max_of_tenant > 0 and call('SCARD', key('open', tenant)) >= max_of_tenant then return {'', 'tenant'} end
forget(tenant)
local size, fields = JOB_BYTES + #arguments.request, {}
for name, value in pairs(cjson.decode(arguments.fields)) do
  fields[#fields + 1], fields[#fields + 2] = name, value
  size = size + #name + #value
end
if max_bytes > 0 and (call('GET', key('bytes', tenant)) or 0) + size > max_bytes then return {'', 'bytes'} end
local order, expires = time_us(), now + ttl_ms
call('HSET', key('job', id), 'tenant', tenant, 'priority', arguments.priority, 'order', order, 'key', arguments.key,
  'digest', digest, 'request', arguments.request, 'state', 'queued', 'created', now, 'expires', expires,
  'retention', arguments.retention_s, 'size', size, unpack(fields))
wait(id, arguments.priority, tenant, order)
call('SET', key('key', arguments.key), id)
call('ZADD', key('jobs', tenant), now, id)
call('ZADD', key('open'), expires, id)
call('SADD', key('open', tenant), id)
if call('HGET', key('room', tenant), 'limit') ~= arguments.max_bytes then
  call('HSET', key('room', tenant), 'limit', max_bytes)
  look_again(tenant)
end
account(tenant, size, math.ceil(ttl_ms / 1000) + arguments.retention_s)
announce('queued', id)
return {id, digest}
