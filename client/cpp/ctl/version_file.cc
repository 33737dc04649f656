#include "client/cpp/ctl/version_file.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "proto/checkpoint/safetensors_header.h"

#include "client/cpp/ctl/safetensors_file.h"

namespace ballast::ctl {
namespace {

constexpr absl::string_view kIndices = ".indices", kValues = ".values";

absl::Status Unnameable(const v1::RunSpec& spec, const v1::TensorSpec& tensor, const std::string& why) {
  return absl::FailedPreconditionError(
      absl::StrCat("run '", spec.run_id(), "' has a tensor named '", tensor.name(), "', ", why));
}

std::map<std::string, std::string> MetadataOf(const v1::RunSpec& spec, const FollowedVersion& version) {
  return {
      {"run", spec.run_id()}, {"step", absl::StrCat(version.step)}, {"generation", absl::StrCat(version.generation)}};
}

}  // namespace

absl::StatusOr<VersionFile> VersionFile::Whole(const Subscriber& subscriber, const FollowedVersion& version) {
  VersionFile file;
  file.metadata_ = MetadataOf(subscriber.spec(), version);
  for (uint32_t i = 0; i < static_cast<uint32_t>(subscriber.spec().tensors_size()); ++i) {
    const v1::TensorSpec& tensor = subscriber.spec().tensors(static_cast<int>(i));
    if (tensor.name() == kReservedTensorName) {
      return Unnameable(subscriber.spec(), tensor, "which no tensor of a safetensors file can be named");
    }
    Tensor whole{.name = tensor.name(), .dtype = FileDtypeOf(tensor.dtype())};
    whole.shape.assign(tensor.shape().begin(), tensor.shape().end());
    whole.bytes = DtypeBytes(whole.dtype);
    for (const uint64_t extent : whole.shape) whole.bytes *= extent;
    file.parts_.push_back({.tensors = {std::move(whole)},
                           .read = [&subscriber, i](absl::Span<std::byte> out) { return subscriber.Read(i, out); }});
  }
  return file;
}

absl::StatusOr<VersionFile> VersionFile::Changes(const Subscriber& subscriber, const FollowedVersion& version,
                                                 const FollowedVersion& base) {
  VersionFile file;
  file.metadata_ = MetadataOf(subscriber.spec(), version);
  file.metadata_["base_step"] = absl::StrCat(base.step);
  file.metadata_["base_generation"] = absl::StrCat(base.generation);
  for (const v1::TensorSpec& tensor : subscriber.spec().tensors()) {
    if (absl::EndsWith(tensor.name(), kIndices) || absl::EndsWith(tensor.name(), kValues)) {
      return Unnameable(subscriber.spec(), tensor, "as what a file of changes has is named: leave --changes out");
    }
  }
  for (const uint32_t i : version.changed) {
    const v1::TensorSpec& tensor = subscriber.spec().tensors(static_cast<int>(i));
    const auto count = subscriber.CountChanged(i);
    if (!count.ok()) return count.status();
    const std::string dtype = FileDtypeOf(tensor.dtype());
    const uint64_t index_bytes = *count * sizeof(int64_t), value_bytes = *count * DtypeBytes(dtype);
    file.parts_.push_back({.tensors = {{absl::StrCat(tensor.name(), kIndices), "I64", {*count}, index_bytes},
                                       {absl::StrCat(tensor.name(), kValues), dtype, {*count}, value_bytes}},
                           .read = [&subscriber, i, n = *count, index_bytes](absl::Span<std::byte> out) {
                             const absl::Span<int64_t> places(reinterpret_cast<int64_t*>(out.data()), n);
                             return subscriber.ReadChanged(i, places, out.subspan(index_bytes));
                           }});
  }
  return file;
}

uint64_t VersionFile::Part::bytes() const {
  uint64_t bytes = 0;
  for (const Tensor& tensor : tensors) bytes += tensor.bytes;
  return bytes;
}

uint64_t VersionFile::bytes() const {
  uint64_t bytes = 0;
  for (const Part& part : parts_) bytes += part.bytes();
  return bytes;
}

absl::Status VersionFile::Write(const std::function<absl::Status(absl::Span<const std::byte>)>& write) const {
  SafetensorsHeader header(metadata_);
  for (const Part& part : parts_) {
    for (const Tensor& tensor : part.tensors) header.Add(tensor.name, tensor.dtype, tensor.shape, tensor.bytes);
  }
  const std::string text = std::move(header).Finish();
  if (auto s = write({reinterpret_cast<const std::byte*>(text.data()), text.size()}); !s.ok()) return s;
  std::vector<std::byte> data;
  for (const Part& part : parts_) {
    data.resize(part.bytes());
    if (auto s = part.read(absl::MakeSpan(data)); !s.ok()) return s;
    if (auto s = write(data); !s.ok()) return s;
  }
  return absl::OkStatus();
}

}  // namespace ballast::ctl
