-- The requests of a load, for wrk: wrk -s benchmarks/gateway.lua URL -- FILE
--
-- FILE is a Lua table that `benchmarks/gateway_wrk.py` writes:
--   path, headers   of every request
--   body            file of the body: opening, step and closing, separated by byte 3. Byte 1 stands for the number
--                   of the conversation, byte 2 for the number of the step
--   conversations   how many take turns; each pass over all of them has one step more. 0: every request is a new one
--   first           position of the first request: 2,100 is the second step of conversation 100 of 1,000
--   sessions        whether each conversation is a session that the client names

local load, opening, step, closing

local function split(text, separator)
  local parts, from = {}, 1
  while true do
    local at = string.find(text, separator, from, true)
    parts[#parts + 1] = string.sub(text, from, at and at - 1)
    if not at then return parts end
    from = at + 1
  end
end

function setup(thread)
  first_thread = thread
end

function init(args)
  load = dofile(args[1])
  local file = assert(io.open(load.body, "rb"))
  local parts = split(file:read("*a"), "\3")
  file:close()
  opening, step, closing = split(parts[1], "\1"), parts[2], split(parts[3], "\1")
  position = load.first -- global, for `done`
end

function request()
  local number, steps = 1000000 + position, 0
  if load.conversations > 0 then
    number = 1000000 + position % load.conversations
    steps = math.floor(position / load.conversations)
  end
  position = position + 1
  if load.sessions then load.headers["x-session-id"] = "bench-" .. number end
  local body = {table.concat(opening, number)}
  for n = 1, steps do
    body[#body + 1] = string.gsub(string.gsub(step, "\1", number), "\2", 1000000 + n)
  end
  body[#body + 1] = table.concat(closing, number)
  return wrk.format("POST", load.path, load.headers, table.concat(body))
end

function done(summary, latency, requests)
  local errors = summary.errors
  io.write(string.format(
    '\n{"requests": %d, "seconds": %f, "p50_ms": %f, "p99_ms": %f, "failed": %d, "broken": %d, "position": %d}\n',
    summary.requests, summary.duration / 1e6, latency:percentile(50) / 1e3, latency:percentile(99) / 1e3,
    errors.status, errors.connect + errors.read + errors.write + errors.timeout, first_thread:get("position")))
end
