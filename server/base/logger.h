// What Log() writes through: one event in, one line out. The process has one logger, on stderr; tests make their own.
#pragma once

#include <cstdint>
#include <functional>
#include <string>
#include <string_view>
#include <unordered_map>

#include "absl/base/thread_annotations.h"
#include "absl/synchronization/mutex.h"
#include "absl/types/span.h"

#include "server/base/log.h"

namespace ballast {

// A line of JSON:
//   {"ts":"2026-01-31T23:59:59.000001Z","level":"info","event":"step_closed","msg":"step closed","run_id":"a","step":7}
// or of text:
//   2026-01-31T23:59:59.000001Z info  step_closed: step closed run_id=a step=7
// The keys come in the order of log.h whatever order they were given in; other keys follow in the order given. Bytes
// that are no UTF-8 become U+FFFD; numbers that JSON has no word for become strings. Thread-safe.
class Logger {
 public:
  enum class Format { kText, kJson };
  struct Options {
    LogLevel level = LogLevel::kInfo;
    Format format = Format::kText;
    std::function<void(std::string_view line)> sink;  // gets whole lines, "\n" included; called by any thread
    std::function<int64_t()> now_us;                  // Unix time
  };

  explicit Logger(Options options);

  void Log(LogLevel level, std::string_view event, std::string_view msg, absl::Span<const LogField> fields);

 private:
  struct Window {  // of one event
    int64_t second = 0;
    uint64_t lines = 0;
    uint64_t suppressed = 0;  // since the last line
  };

  bool Admit(std::string_view event, int64_t now_us, uint64_t* suppressed);

  const Options options_;
  absl::Mutex mutex_;
  std::unordered_map<std::string, Window> windows_ ABSL_GUARDED_BY(mutex_);  // events are a closed set
};

}  // namespace ballast
