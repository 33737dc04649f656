// `ballastctl diff`: how two safetensors files differ. Asks no daemon.
#include <google/protobuf/struct.pb.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "client/cpp/ctl/command.h"
#include "client/cpp/ctl/safetensors_file.h"
#include "client/cpp/ctl/table.h"
#include "client/cpp/wire/wire_format.h"

namespace ballast::ctl {
namespace {

constexpr uint64_t kBlockElements = 1 << 20;

struct TensorDifference {
  std::string name;
  uint64_t differing = 0, elements = 0;
  double largest = 0;    // infinity: between values of which one is not finite
  bool measured = true;  // false: of no dtype that this program computes with
  std::string only;      // why they cannot be compared; else empty
};

std::string FormText(const FileTensor& tensor) {
  return absl::StrCat(tensor.dtype, " [", absl::StrJoin(tensor.shape, ", "), "]");
}

absl::Status DecodeAll(const std::string& format, absl::Span<const std::byte> codes, std::vector<float>* values) {
  values->resize(codes.size() / FormatBytes(format));
  if (format != "fp32") {
    return DecodeWeights({.format = format, .codes = codes}, "fp32", reinterpret_cast<std::byte*>(values->data()));
  }
  std::memcpy(values->data(), codes.data(), codes.size());
  return absl::OkStatus();
}

// Compares elements of the same dtype, block by block.
class BlockComparison {
 public:
  BlockComparison(const std::string& dtype, TensorDifference* difference)
      : width_(std::max<uint64_t>(1, DtypeBytes(dtype))), format_(WireFormatOf(dtype)), difference_(*difference) {
    difference_.measured = !format_.empty();
  }

  absl::Status Add(absl::Span<const std::byte> a, absl::Span<const std::byte> b) {
    if (std::memcmp(a.data(), b.data(), a.size()) == 0) return absl::OkStatus();
    if (!format_.empty()) {
      if (auto s = DecodeAll(format_, a, &ours_); !s.ok()) return s;
      if (auto s = DecodeAll(format_, b, &theirs_); !s.ok()) return s;
    }
    for (size_t i = 0; i < a.size() / width_; ++i) {
      if (std::memcmp(a.data() + i * width_, b.data() + i * width_, width_) == 0) continue;
      ++difference_.differing;
      if (format_.empty()) continue;
      const double apart = std::abs(static_cast<double>(ours_[i]) - static_cast<double>(theirs_[i]));
      difference_.largest =
          std::max(difference_.largest, std::isnan(apart) ? std::numeric_limits<double>::infinity() : apart);
    }
    return absl::OkStatus();
  }
  uint64_t width() const { return width_; }

 private:
  const uint64_t width_;
  const std::string format_;
  TensorDifference& difference_;
  std::vector<float> ours_, theirs_;
};

absl::StatusOr<TensorDifference> Compare(const std::string& name, const SafetensorsFile& a, const FileTensor& in_a,
                                         const SafetensorsFile& b, const FileTensor& in_b) {
  TensorDifference difference{.name = name, .elements = in_a.elements()};
  if (in_a.dtype != in_b.dtype || in_a.shape != in_b.shape) {
    difference.only = absl::StrCat(FormText(in_a), " in one, ", FormText(in_b), " in the other");
    return difference;
  }
  BlockComparison comparison(in_a.dtype, &difference);
  const uint64_t bytes = in_a.end - in_a.begin, block = kBlockElements * comparison.width();
  std::vector<std::byte> ours, theirs;
  for (uint64_t begin = 0; begin < bytes; begin += block) {
    ours.resize(std::min(block, bytes - begin));
    theirs.resize(ours.size());
    if (auto s = a.Read(in_a.begin + begin, absl::MakeSpan(ours)); !s.ok()) return s;
    if (auto s = b.Read(in_b.begin + begin, absl::MakeSpan(theirs)); !s.ok()) return s;
    if (auto s = comparison.Add(ours, theirs); !s.ok()) return s;
  }
  return difference;
}

absl::StatusOr<std::vector<TensorDifference>> CompareAll(const SafetensorsFile& a, const SafetensorsFile& b) {
  std::vector<TensorDifference> differences;
  for (const auto& [name, in_a] : a.tensors()) {
    const auto in_b = b.tensors().find(name);
    if (in_b == b.tensors().end()) {
      differences.push_back({.name = name, .elements = in_a.elements(), .only = absl::StrCat("only in ", a.path())});
      continue;
    }
    auto difference = Compare(name, a, in_a, b, in_b->second);
    if (!difference.ok()) return difference.status();
    differences.push_back(*std::move(difference));
  }
  for (const auto& [name, in_b] : b.tensors()) {
    if (a.tensors().contains(name)) continue;
    differences.push_back({.name = name, .elements = in_b.elements(), .only = absl::StrCat("only in ", b.path())});
  }
  return differences;
}

bool Differs(const TensorDifference& difference) { return difference.differing > 0 || !difference.only.empty(); }

TensorDifference TotalOf(const std::vector<TensorDifference>& differences) {
  TensorDifference total{.name = "total"};
  for (const TensorDifference& one : differences) {
    total.differing += one.only.empty() ? one.differing : one.elements;
    total.elements += one.elements;
    total.largest = std::max(total.largest, one.largest);
    total.measured &= one.measured || one.differing == 0;
  }
  return total;
}

void Print(const std::vector<TensorDifference>& differences, std::ostream& out) {
  Table table({Table::kLeft, Table::kRight, Table::kRight, Table::kRight});
  table.Row({"TENSOR", "DIFFER", "OF", "LARGEST"});
  const auto row = [&](const TensorDifference& one) {
    table.Row({one.name, Grouped(one.differing), Grouped(one.elements), one.measured ? Number(one.largest) : "-"});
  };
  for (const TensorDifference& one : differences) {
    if (one.differing > 0) row(one);
  }
  row(TotalOf(differences));
  table.Print(out);
  for (const TensorDifference& one : differences) {
    if (!one.only.empty()) out << Visible(one.name) << ": " << one.only << "\n";
  }
}

int PrintDifferencesAsJson(const Invocation& invocation, const std::vector<TensorDifference>& differences) {
  google::protobuf::Struct answer;
  const auto fill = [](const TensorDifference& one, google::protobuf::Struct* to) {
    auto& fields = *to->mutable_fields();
    fields["tensor"].set_string_value(one.name);
    fields["differing"].set_number_value(static_cast<double>(one.differing));
    fields["elements"].set_number_value(static_cast<double>(one.elements));
    if (one.measured && std::isfinite(one.largest)) fields["largest"].set_number_value(one.largest);
    if (!one.only.empty()) fields["only"].set_string_value(one.only);
  };
  auto* list = (*answer.mutable_fields())["tensors"].mutable_list_value();
  for (const TensorDifference& one : differences) {
    if (Differs(one)) fill(one, list->add_values()->mutable_struct_value());
  }
  fill(TotalOf(differences), (*answer.mutable_fields())["total"].mutable_struct_value());
  return PrintJson(invocation, answer);
}

int Diff(const Invocation& invocation) {
  const auto a = SafetensorsFile::Open(invocation.arguments[0]);
  if (!a.ok()) return Misused(invocation.err, a.status(), "diff");
  const auto b = SafetensorsFile::Open(invocation.arguments[1]);
  if (!b.ok()) return Misused(invocation.err, b.status(), "diff");
  const auto differences = CompareAll(*a, *b);
  if (!differences.ok()) return Misused(invocation.err, differences.status(), "diff");
  const bool differ = std::any_of(differences->begin(), differences->end(), Differs);
  if (invocation.json) {
    if (const int printed = PrintDifferencesAsJson(invocation, *differences); printed != kOk) return printed;
  } else if (differ) {
    Print(*differences, invocation.out);
  }
  return differ ? kRefused : kOk;
}

}  // namespace

Command DiffCommand() {
  return {
      .name = "diff",
      .arguments = {"A", "B"},
      .summary = "how two safetensors files differ: which tensors, in how many elements, by how much",
      .details =
          "Asks no daemon. A line for each tensor that differs: in how many elements, bit by bit, and by how much at\n"
          "most; then the same of all. Files that are the same have none. Exit code 0: they are the same, 1: they\n"
          "differ, 64: one cannot be read.\n",
      .flags = {},
      .run = Diff};
}

}  // namespace ballast::ctl
