// Structured logs on stderr, one event a line: JSON, or text on a terminal. Keys are fixed (ts, level, event, msg,
// run_id, rank, step, from_step, generation, reason, tensor, peer, identity, transport, dur_s, bytes, err); values carry what
// varies, msg never does. A line that stderr does not take is lost, and nobody waits for it for long (line_writer.h).
// Thread-safe.
//
//   Log(LogLevel::kInfo, "step_closed", "step closed", {{"run_id", id}, {"step", step}});
#pragma once

#include <cstdint>
#include <initializer_list>
#include <string>
#include <string_view>
#include <variant>

namespace ballast {

// kAudit: what must be known later on. Shown as info, whatever level is shown, and never left out for other lines.
enum class LogLevel { kDebug, kInfo, kWarn, kError, kAudit };

struct LogField {
  std::string_view key;
  std::variant<std::string, int64_t, uint64_t, double, bool> value;
};

// Once, before any other thread. `format`: text | json.
void ConfigureLog(LogLevel level, std::string_view format);
// At most 10 lines a second per event; the next line of that event then says how many were suppressed.
void Log(LogLevel level, std::string_view event, std::string_view msg, std::initializer_list<LogField> fields = {});

}  // namespace ballast
