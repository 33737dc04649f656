// A safetensors file that is read: its header, checked, and its bytes. Thread-compatible.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"

namespace ballast::ctl {

struct FileTensor {
  std::string dtype;  // F32, BF16, ...
  std::vector<uint64_t> shape;
  uint64_t begin = 0, end = 0;  // in the file
  uint64_t elements() const;
};

class SafetensorsFile {
 public:
  // INVALID_ARGUMENT, NOT_FOUND: it cannot be read, or is no such file.
  static absl::StatusOr<SafetensorsFile> Open(const std::string& path);
  ~SafetensorsFile();
  SafetensorsFile(SafetensorsFile&& other) noexcept;
  SafetensorsFile& operator=(SafetensorsFile&&) = delete;

  const std::string& path() const { return path_; }
  const std::map<std::string, FileTensor>& tensors() const { return tensors_; }
  const std::map<std::string, std::string>& metadata() const { return metadata_; }
  // All of these bytes of the file. INVALID_ARGUMENT: it is shorter by now, or cannot be read.
  absl::Status Read(uint64_t begin, absl::Span<std::byte> to) const;

 private:
  SafetensorsFile(std::string path, int fd, uint64_t bytes) : path_(std::move(path)), fd_(fd), bytes_(bytes) {}
  absl::Status ReadHeader();
  absl::Status TakeHeader(const std::string& json, uint64_t data);
  absl::Status Wrong(const std::string& what) const;

  std::string path_;
  int fd_;
  uint64_t bytes_;
  std::map<std::string, FileTensor> tensors_;
  std::map<std::string, std::string> metadata_;
};

// Of an element; 0: this program does not know the dtype.
uint64_t DtypeBytes(const std::string& dtype);
// The wire's name of a float that this program computes with (fp32, bf16, fp16, fp8-e4m3); empty: it is none.
std::string WireFormatOf(const std::string& dtype);
// And back; empty: a file has none for it.
std::string FileDtypeOf(const std::string& wire);

}  // namespace ballast::ctl
