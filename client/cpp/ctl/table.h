// Text tables for people, and the units in them.
#pragma once

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace ballast::ctl {

// Columns as wide as their widest cell; the first left-aligned, the others as told.
class Table {
 public:
  enum Align { kLeft, kRight };
  explicit Table(std::vector<Align> columns) : columns_(std::move(columns)) {}
  void Row(std::vector<std::string> cells);
  void Print(std::ostream& out) const;

 private:
  std::vector<Align> columns_;
  std::vector<std::vector<std::string>> rows_;
};

// With control characters as \xNN, and others that are not seen as \uNNNN: names are whatever a trainer calls its tensors,
// and a terminal does what they say.
std::string Visible(absl::string_view text);
std::string Bytes(uint64_t bytes);                              // 1.50 MiB
std::string PerParameter(uint64_t bytes, uint64_t parameters);  // 5.125 B/param
std::string Grouped(uint64_t number);                           // 8,000,000,000
std::string Duration(double seconds);                           // 3 d 4 h
std::string DurationSince(double unix_s);                       // by this machine's clock
std::string Number(double value);                               // 0.01234

}  // namespace ballast::ctl
