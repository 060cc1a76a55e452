#!lua flags=allow-oom
-- id, delay_ms (until the next attempt), uncounted (number of attempts that do not count) → nothing.
if call('ZSCORE', key('notify'), arguments.id) then
  call('ZADD', key('notify'), now + arguments.delay_ms, arguments.id)
  if arguments.uncounted ~= '0' then call('HINCRBY', key('job', arguments.id), 'notified', 0 - arguments.uncounted) end
end
