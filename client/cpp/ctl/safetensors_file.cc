#include "client/cpp/ctl/safetensors_file.h"

#include <fcntl.h>
#include <google/protobuf/struct.pb.h>
#include <google/protobuf/util/json_util.h>
#include <sys/stat.h>
#include <unistd.h>

#include <array>
#include <cerrno>
#include <cmath>
#include <cstring>
#include <optional>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/checkpoint/safetensors_header.h"

namespace ballast::ctl {
namespace {

constexpr uint64_t kMostHeaderBytes = 100'000'000;  // readers of the format refuse more

struct Dtype {
  const char* name;
  uint64_t bytes;
  const char* wire;
};
constexpr std::array kDtypes = {Dtype{"F64", 8, ""},
                                Dtype{"F32", 4, "fp32"},
                                Dtype{"F16", 2, "fp16"},
                                Dtype{"BF16", 2, "bf16"},
                                Dtype{"F8_E4M3", 1, "fp8-e4m3"},
                                Dtype{"F8_E5M2", 1, ""},
                                Dtype{"I64", 8, ""},
                                Dtype{"U64", 8, ""},
                                Dtype{"I32", 4, ""},
                                Dtype{"U32", 4, ""},
                                Dtype{"I16", 2, ""},
                                Dtype{"U16", 2, ""},
                                Dtype{"I8", 1, ""},
                                Dtype{"U8", 1, ""},
                                Dtype{"BOOL", 1, ""}};

using google::protobuf::Value;

// A number of the header: whole, and exact as JSON's are read.
std::optional<uint64_t> WholeOf(const Value& value) {
  const double number = value.number_value();
  if (value.kind_case() != Value::kNumberValue || number < 0 || number > 0x1p53 || number != std::floor(number)) {
    return std::nullopt;
  }
  return static_cast<uint64_t>(number);
}

std::optional<std::vector<uint64_t>> WholesOf(const google::protobuf::Struct& fields, const char* name) {
  const auto found = fields.fields().find(name);
  if (found == fields.fields().end() || found->second.kind_case() != Value::kListValue) return std::nullopt;
  std::vector<uint64_t> numbers;
  for (const Value& value : found->second.list_value().values()) {
    const auto number = WholeOf(value);
    if (!number) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

// None: it is not as the format has it, or does not lie in so many bytes of data.
std::optional<FileTensor> TensorOf(const Value& value, uint64_t data_bytes) {
  const google::protobuf::Struct& fields = value.struct_value();
  const auto dtype = fields.fields().find("dtype");
  const auto shape = WholesOf(fields, "shape"), offsets = WholesOf(fields, "data_offsets");
  if (dtype == fields.fields().end() || !shape || !offsets || offsets->size() != 2) return std::nullopt;
  FileTensor tensor{.dtype = dtype->second.string_value(), .shape = *shape};
  tensor.begin = (*offsets)[0];
  tensor.end = (*offsets)[1];
  if (tensor.begin > tensor.end || tensor.end > data_bytes) return std::nullopt;
  uint64_t bytes = DtypeBytes(tensor.dtype);
  if (bytes == 0) return tensor;
  for (const uint64_t extent : tensor.shape) {
    if (extent != 0 && bytes > data_bytes / extent) return std::nullopt;
    bytes *= extent;
  }
  return bytes == tensor.end - tensor.begin ? std::optional(tensor) : std::nullopt;
}

}  // namespace

uint64_t DtypeBytes(const std::string& dtype) {
  for (const Dtype& known : kDtypes) {
    if (dtype == known.name) return known.bytes;
  }
  return 0;
}

std::string WireFormatOf(const std::string& dtype) {
  for (const Dtype& known : kDtypes) {
    if (dtype == known.name) return known.wire;
  }
  return "";
}

std::string FileDtypeOf(const std::string& wire) {
  for (const Dtype& known : kDtypes) {
    if (wire == known.wire && !wire.empty()) return known.name;
  }
  return "";
}

uint64_t FileTensor::elements() const {
  uint64_t n = 1;
  for (const uint64_t extent : shape) n *= extent;
  return n;
}

absl::StatusOr<SafetensorsFile> SafetensorsFile::Open(const std::string& path) {
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
  if (fd < 0) return absl::NotFoundError(absl::StrCat(path, ": ", std::strerror(errno)));
  struct stat found {};
  fstat(fd, &found);
  SafetensorsFile file(path, fd, static_cast<uint64_t>(found.st_size));
  if (!S_ISREG(found.st_mode)) return file.Wrong("it is no file");
  if (auto s = file.ReadHeader(); !s.ok()) return s;
  return file;
}

SafetensorsFile::SafetensorsFile(SafetensorsFile&& other) noexcept
    : path_(std::move(other.path_)),
      fd_(std::exchange(other.fd_, -1)),
      bytes_(other.bytes_),
      tensors_(std::move(other.tensors_)),
      metadata_(std::move(other.metadata_)) {}

SafetensorsFile::~SafetensorsFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status SafetensorsFile::Wrong(const std::string& what) const {
  return absl::InvalidArgumentError(absl::StrCat(path_, " is not a whole safetensors file: ", what));
}

absl::Status SafetensorsFile::Read(uint64_t begin, absl::Span<std::byte> to) const {
  while (!to.empty()) {
    const ssize_t got = pread(fd_, to.data(), to.size(), static_cast<off_t>(begin));
    if (got < 0 && errno == EINTR) continue;
    if (got < 0) return absl::InvalidArgumentError(absl::StrCat(path_, ": ", std::strerror(errno)));
    if (got == 0) return Wrong("it ends early");
    begin += static_cast<uint64_t>(got);
    to.remove_prefix(static_cast<size_t>(got));
  }
  return absl::OkStatus();
}

absl::Status SafetensorsFile::ReadHeader() {
  std::array<std::byte, 8> length;
  if (bytes_ < length.size()) return Wrong(absl::StrCat("it has ", bytes_, " bytes"));
  if (auto s = Read(0, absl::MakeSpan(length)); !s.ok()) return s;
  uint64_t header = 0;
  for (size_t i = 0; i < 8; ++i) header |= static_cast<uint64_t>(length[i]) << (8 * i);
  if (header > kMostHeaderBytes || header > bytes_ - 8) {
    return Wrong(absl::StrCat("its header is said to have ", header, " bytes"));
  }
  std::string json(header, '\0');
  if (auto s = Read(8, absl::MakeSpan(reinterpret_cast<std::byte*>(json.data()), json.size())); !s.ok()) return s;
  return TakeHeader(json, 8 + header);
}

absl::Status SafetensorsFile::TakeHeader(const std::string& json, uint64_t data) {
  google::protobuf::Struct header;
  if (!google::protobuf::util::JsonStringToMessage(json, &header).ok()) return Wrong("its header is no JSON object");
  for (const auto& [name, value] : header.fields()) {
    if (name == kReservedTensorName) {
      for (const auto& [key, text] : value.struct_value().fields()) metadata_[key] = text.string_value();
      continue;
    }
    auto tensor = TensorOf(value, bytes_ - data);
    if (!tensor) return Wrong(absl::StrCat("its header has '", name, "' in no form or place that it can have"));
    tensor->begin += data;
    tensor->end += data;
    tensors_[name] = *std::move(tensor);
  }
  return absl::OkStatus();
}

}  // namespace ballast::ctl
