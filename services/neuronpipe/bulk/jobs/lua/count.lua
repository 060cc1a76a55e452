#!lua flags=allow-oom
-- → for each priority: waiting jobs, running jobs, ms for which the first job has waited; then jobs that were set aside,
-- and notifications that wait.
local counts = {}
for _, priority in ipairs(PRIORITIES) do
  local tenants = key('waiting', priority)
  local first = call('ZRANGE', tenants, 0, 0, 'WITHSCORES')[2]
  local refused = call('ZRANGEBYSCORE', tenants, REFUSED, '+inf', 'WITHSCORES', 'LIMIT', 0, 1)[2]
  local waiting = tonumber(call('HGET', key('waiting'), priority) or 0)
  local oldest = first and math.min(first % REFUSED, (refused or first) % REFUSED)
  local age = first and math.max(0, now - math.floor(oldest / 1000)) or 0
  counts[#counts + 1] = {waiting, call('ZCARD', key('running', priority)), age}
end
counts[#counts + 1] = call('ZCARD', key('dead'))
counts[#counts + 1] = call('ZCARD', key('notify'))
return counts
