#include "client/cpp/ctl/table.h"

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "proto/utf8.h"

namespace ballast::ctl {

void Table::Row(std::vector<std::string> cells) {
  for (std::string& cell : cells) cell = Visible(cell);
  rows_.push_back(std::move(cells));
}

void Table::Print(std::ostream& out) const {
  std::vector<size_t> widths(columns_.size());
  for (const auto& row : rows_) {
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  for (const auto& row : rows_) {
    std::string line;
    for (size_t i = 0; i < row.size(); ++i) {
      const std::string blank(widths[i] - row[i].size(), ' ');
      const bool left = columns_[i] == Align::kLeft;
      absl::StrAppend(&line, i == 0 ? "" : "  ", left ? row[i] : blank, left ? blank : row[i]);
    }
    line.erase(line.find_last_not_of(' ') + 1);
    out << line << "\n";
  }
}

std::string Visible(absl::string_view text) {
  std::string visible;
  for (std::string_view rest(text.data(), text.size()); !rest.empty();) {
    const size_t length = Utf8CharacterLength(rest);
    const std::string_view character = rest.substr(0, std::max<size_t>(length, 1));
    rest.remove_prefix(character.size());
    const char32_t code_point = length > 0 ? CodePointOf(character) : U'?';
    if (!IsUnseen(code_point)) {
      visible += character;
    } else {
      absl::StrAppendFormat(&visible, code_point < 0x100 ? "\\x%02x" : "\\u%04x", static_cast<uint32_t>(code_point));
    }
  }
  return visible;
}

std::string Bytes(uint64_t bytes) {
  if (bytes < 1024) return absl::StrCat(bytes, " B");
  double value = static_cast<double>(bytes);
  const char* unit = "B";
  for (const char* larger : {"KiB", "MiB", "GiB", "TiB"}) {
    if (value < 1024) break;
    value /= 1024;
    unit = larger;
  }
  return absl::StrFormat("%.2f %s", value, unit);
}

std::string PerParameter(uint64_t bytes, uint64_t parameters) {
  if (parameters == 0) return "-";
  return absl::StrFormat("%.3f B/param", static_cast<double>(bytes) / static_cast<double>(parameters));
}

std::string Grouped(uint64_t number) {
  const std::string digits = absl::StrCat(number);
  std::string grouped;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) grouped += ',';
    grouped += digits[i];
  }
  return grouped;
}

std::string DurationSince(double unix_s) {
  return Duration(std::max(0.0, absl::ToDoubleSeconds(absl::Now() - absl::UnixEpoch()) - unix_s));
}

std::string Duration(double seconds) {
  if (seconds < 1) return absl::StrFormat("%.1f ms", seconds * 1e3);
  if (seconds < 60) return absl::StrFormat("%.1f s", seconds);
  const int64_t minutes = static_cast<int64_t>(seconds / 60);
  if (minutes < 60) return absl::StrFormat("%d min %d s", minutes, static_cast<int64_t>(seconds) % 60);
  if (minutes < 24 * 60) return absl::StrFormat("%d h %d min", minutes / 60, minutes % 60);
  return absl::StrFormat("%d d %d h", minutes / (24 * 60), minutes / 60 % 24);
}

std::string Number(double value) { return absl::StrFormat("%.4g", value); }

}  // namespace ballast::ctl
