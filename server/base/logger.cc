#include "server/base/logger.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/time.h"
#include "proto/utf8.h"

#include "server/base/utf8.h"

namespace ballast {
namespace {

constexpr uint64_t kLinesPerSecond = 10;
constexpr std::array<std::string_view, 12> kKeys = {"run_id", "rank", "step",      "from_step", "generation", "reason",
                                                    "tensor", "peer", "transport", "dur_s",     "bytes",      "err"};

const char* LevelName(LogLevel level) {
  constexpr std::array kNames = {"debug", "info", "warn", "error", "info"};
  return kNames[static_cast<size_t>(level)];
}

std::string Timestamp(int64_t unix_us) {
  return absl::FormatTime("%Y-%m-%dT%H:%M:%E6SZ", absl::FromUnixMicros(unix_us), absl::UTCTimeZone());
}

// As RFC 8259 has it, quotes included. What a terminal would obey instead of showing it is escaped.
std::string Quoted(std::string_view bytes) {
  const std::string text = ValidUtf8(bytes);
  std::string out = "\"";
  for (std::string_view rest = text; !rest.empty();) {
    const std::string_view character = rest.substr(0, Utf8CharacterLength(rest));
    rest.remove_prefix(character.size());
    if (const char32_t code_point = CodePointOf(character); IsUnseen(code_point)) {
      out += JsonEscape(code_point);
      continue;
    }
    if (character == "\"" || character == "\\") out += '\\';
    out += character;
  }
  return out + '"';
}

// Shortest text that reads back as the same number.
std::string Number(double value) {
  std::array<char, 32> text;
  const auto end = std::to_chars(text.data(), text.data() + text.size(), value);
  return {text.data(), end.ptr};
}

std::string JsonValue(const LogField& field) {
  struct {
    std::string operator()(const std::string& v) const { return Quoted(v); }
    std::string operator()(int64_t v) const { return absl::StrCat(v); }
    std::string operator()(uint64_t v) const { return absl::StrCat(v); }
    std::string operator()(double v) const { return std::isfinite(v) ? Number(v) : Quoted(Number(v)); }
    std::string operator()(bool v) const { return v ? "true" : "false"; }
  } as_json;
  return std::visit(as_json, field.value);
}

// Prints a string without quotes where that is unambiguous.
std::string TextValue(const LogField& field) {
  const auto* text = std::get_if<std::string>(&field.value);
  if (text == nullptr) return JsonValue(field);
  const bool bare = !text->empty() && std::all_of(text->begin(), text->end(), [](char c) {
    return c > ' ' && c < 0x7F && c != '"' && c != '=' && c != '\\';
  });
  return bare ? *text : Quoted(*text);
}

std::vector<LogField> InOrder(absl::Span<const LogField> fields) {
  const auto place = [](const LogField& f) { return std::find(kKeys.begin(), kKeys.end(), f.key) - kKeys.begin(); };
  std::vector<LogField> sorted(fields.begin(), fields.end());
  std::stable_sort(sorted.begin(), sorted.end(),
                   [&](const LogField& a, const LogField& b) { return place(a) < place(b); });
  return sorted;
}

struct Line {
  int64_t unix_us;
  LogLevel level;
  std::string_view event, msg;
  std::vector<LogField> fields;
};

std::string Json(const Line& line) {
  std::string out = absl::StrCat("{\"ts\":\"", Timestamp(line.unix_us), "\",\"level\":\"", LevelName(line.level),
                                 "\",\"event\":", Quoted(line.event), ",\"msg\":", Quoted(line.msg));
  for (const LogField& field : line.fields) absl::StrAppend(&out, ",", Quoted(field.key), ":", JsonValue(field));
  return out + "}\n";
}

std::string Text(const Line& line) {
  std::string out = absl::StrFormat("%s %-5s %s: %s", Timestamp(line.unix_us), LevelName(line.level),
                                    std::string(line.event), ValidUtf8(line.msg));
  for (const LogField& field : line.fields) absl::StrAppend(&out, " ", std::string(field.key), "=", TextValue(field));
  return out + "\n";
}

}  // namespace

Logger::Logger(Options options) : options_(std::move(options)) {}

bool Logger::Admit(std::string_view event, int64_t now_us, uint64_t* suppressed) {
  absl::MutexLock lock(&mutex_);
  Window& window = windows_[std::string(event)];
  // The second differs; it need not be later, since the clock may be set back.
  if (const int64_t second = now_us / 1'000'000; second != window.second) {
    window.second = second;
    window.lines = 0;
  }
  if (window.lines == kLinesPerSecond) {
    ++window.suppressed;
    return false;
  }
  ++window.lines;
  *suppressed = std::exchange(window.suppressed, 0);
  return true;
}

void Logger::Log(LogLevel level, std::string_view event, std::string_view msg, absl::Span<const LogField> fields) {
  if (level < options_.level) return;
  const int64_t now_us = options_.now_us();
  uint64_t suppressed = 0;
  if (level != LogLevel::kAudit && !Admit(event, now_us, &suppressed)) return;
  Line line{.unix_us = now_us, .level = level, .event = event, .msg = msg, .fields = InOrder(fields)};
  if (suppressed > 0) line.fields.push_back({"suppressed", suppressed});
  options_.sink(options_.format == Format::kJson ? Json(line) : Text(line));
}

}  // namespace ballast
