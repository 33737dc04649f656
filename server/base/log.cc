#include "server/base/log.h"

#include <unistd.h>

#include <memory>
#include <string>

#include "absl/time/clock.h"

#include "server/base/line_writer.h"
#include "server/base/logger.h"

namespace ballast {
namespace {

int64_t UnixMicros() { return absl::ToUnixMicros(absl::Now()); }

std::string NoteOfLost(Logger::Format format, uint64_t lines) {
  std::string note;
  const auto keep = [&](std::string_view line) { note = std::string(line); };
  Logger({.level = LogLevel::kWarn, .format = format, .sink = keep, .now_us = UnixMicros})
      .Log(LogLevel::kWarn, "log_lost", "lines of the log were lost: nobody took them", {{"lines", lines}});
  return note;
}

// own: as in LineWriter.
Logger::Options OnStderr(LogLevel level, std::string_view name, bool own) {
  const auto format = name == "json" ? Logger::Format::kJson : Logger::Format::kText;
  const auto writer =
      std::make_shared<LineWriter>(STDERR_FILENO, own, [format](uint64_t lost) { return NoteOfLost(format, lost); });
  return {.level = level,
          .format = format,
          .sink = [writer](std::string_view line) { writer->Write(line); },
          .now_us = UnixMicros};
}

// Never destroyed: threads may log until the process is gone.
std::unique_ptr<Logger>& ProcessLogger() {
  static auto& logger = *new std::unique_ptr<Logger>(new Logger(OnStderr(LogLevel::kInfo, "text", /*own=*/false)));
  return logger;
}

}  // namespace

void ConfigureLog(LogLevel level, std::string_view format) {
  ProcessLogger() = std::make_unique<Logger>(OnStderr(level, format, /*own=*/true));
}

void Log(LogLevel level, std::string_view event, std::string_view msg, std::initializer_list<LogField> fields) {
  ProcessLogger()->Log(level, event, msg, absl::MakeConstSpan(fields.begin(), fields.size()));
}

}  // namespace ballast
