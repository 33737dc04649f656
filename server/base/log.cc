#include "server/base/log.h"

#include <unistd.h>

#include <cerrno>
#include <memory>

#include "absl/time/clock.h"

#include "server/base/logger.h"

namespace ballast {
namespace {

// Each line is one write, so that lines of several threads, or of other processes on the same pipe, stay whole. A line
// that stderr does not take is lost: there is nowhere to say so.
void WriteToStderr(std::string_view line) {
  while (!line.empty()) {
    const ssize_t written = write(STDERR_FILENO, line.data(), line.size());
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return;
    line.remove_prefix(static_cast<size_t>(written));
  }
}

Logger::Options OnStderr(LogLevel level, std::string_view format) {
  return {.level = level,
          .format = format == "json" ? Logger::Format::kJson : Logger::Format::kText,
          .sink = WriteToStderr,
          .now_us = [] { return absl::ToUnixMicros(absl::Now()); }};
}

// Never destroyed: threads may log until the process is gone.
std::unique_ptr<Logger>& ProcessLogger() {
  static auto& logger = *new std::unique_ptr<Logger>(new Logger(OnStderr(LogLevel::kInfo, "text")));
  return logger;
}

}  // namespace

void ConfigureLog(LogLevel level, std::string_view format) {
  ProcessLogger() = std::make_unique<Logger>(OnStderr(level, format));
}

void Log(LogLevel level, std::string_view event, std::string_view msg, std::initializer_list<LogField> fields) {
  ProcessLogger()->Log(level, event, msg, absl::MakeConstSpan(fields.begin(), fields.size()));
}

}  // namespace ballast
