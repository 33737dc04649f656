// GPU memory and streams for tests and benchmarks. A CUDA call that fails throws a CudaFailure that names the call;
// there is nothing to be done after one, so main() prints it and ends.
#pragma once

#include <cuda_runtime.h>

#include <cstddef>
#include <cstdint>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "kernels/cuda/cuda_kernels.h"

namespace ballast::kernels {

inline constexpr int kNoGpuExitCode = 77;

struct CudaFailure : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// why: what failed, or nothing.
inline void Check(const std::string& why, const std::string& call) {
  if (!why.empty()) throw CudaFailure(call + ": " + why);
}
// `error` is a cudaError_t; the kernels' interface has it as an int.
inline void Check(int error, const std::string& call) {
  if (error == cudaSuccess) return;
  const auto code = static_cast<cudaError_t>(error);
  throw CudaFailure(call + ": " + cudaGetErrorName(code) + ": " + cudaGetErrorString(code));
}

// Empty, or why there is no GPU to use.
inline std::string WhyNoGpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count > 0 ? "" : "the driver lists none";
}

// Does not wait for the default stream, so a launch that went there by mistake shows.
class Stream {
 public:
  Stream() { Check(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreateWithFlags"); }
  Stream(const Stream&) = delete;
  ~Stream() { cudaStreamDestroy(stream_); }
  CudaStream get() const { return stream_; }
  void Wait(const std::string& what) const { Check(cudaStreamSynchronize(stream_), "cudaStreamSynchronize: " + what); }

 private:
  cudaStream_t stream_ = nullptr;
};

// Movable owner. Copies and fills are in the order of their stream.
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(uint64_t bytes) : bytes_(bytes) {
    Check(cudaMalloc(&data_, bytes > 0 ? bytes : 1), "cudaMalloc of " + std::to_string(bytes) + " bytes");
  }
  DeviceArray(DeviceArray&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(std::exchange(other.bytes_, 0)) {}
  DeviceArray& operator=(DeviceArray&& other) noexcept {
    std::swap(data_, other.data_);
    std::swap(bytes_, other.bytes_);
    return *this;
  }
  ~DeviceArray() { cudaFree(data_); }

  std::byte* data() const { return static_cast<std::byte*>(data_); }
  template <class T>
  T* as() const {
    return static_cast<T*>(data_);
  }
  uint64_t bytes() const { return bytes_; }

  void Upload(const void* from, uint64_t bytes, const Stream& stream) {
    Check(cudaMemcpyAsync(data_, from, bytes, cudaMemcpyHostToDevice, stream.get()), "cudaMemcpyAsync to the device");
  }
  void Download(void* to, uint64_t bytes, const Stream& stream) const {
    Check(cudaMemcpyAsync(to, data_, bytes, cudaMemcpyDeviceToHost, stream.get()), "cudaMemcpyAsync to the host");
    stream.Wait("after a download");
  }
  void Fill(std::byte value, const Stream& stream) {
    Check(cudaMemsetAsync(data_, static_cast<int>(value), bytes_, stream.get()), "cudaMemsetAsync");
  }

 private:
  void* data_ = nullptr;
  uint64_t bytes_ = 0;
};

template <class T>
DeviceArray Uploaded(const std::vector<T>& values, const Stream& stream) {
  DeviceArray array(values.size() * sizeof(T));
  array.Upload(values.data(), array.bytes(), stream);
  stream.Wait("after an upload");
  return array;
}
template <class T>
std::vector<T> Downloaded(const DeviceArray& array, const Stream& stream) {
  std::vector<T> values(array.bytes() / sizeof(T));
  array.Download(values.data(), array.bytes(), stream);
  return values;
}

// Arrays one after the other in a buffer, 256-byte aligned, each with 256 bytes or more behind it that belong to none.
class Layout {
 public:
  uint64_t Add(uint64_t bytes) {
    const uint64_t at = size_;
    size_ += (bytes + 2 * kLine - 1) / kLine * kLine;
    return at;
  }
  uint64_t size() const { return size_; }

 private:
  static constexpr uint64_t kLine = 256;
  uint64_t size_ = kLine;
};

// One buffer twice: in host memory and on the device.
class Twin {
 public:
  Twin(uint64_t bytes, std::byte fill)
      : bytes_(bytes), host_((bytes + sizeof(Line) - 1) / sizeof(Line)), array_(bytes) {
    std::fill_n(host(), bytes, fill);
  }
  std::byte* host() { return reinterpret_cast<std::byte*>(host_.data()); }
  const std::byte* host() const { return reinterpret_cast<const std::byte*>(host_.data()); }
  std::byte* device() const { return array_.data(); }
  uint64_t bytes() const { return bytes_; }
  void Upload(const Stream& stream) {
    array_.Upload(host(), bytes_, stream);
    stream.Wait("after an upload");
  }
  // What is on the device now.
  std::vector<std::byte> Downloaded(const Stream& stream) const {
    return kernels::Downloaded<std::byte>(array_, stream);
  }

 private:
  struct alignas(256) Line {
    std::byte bytes[256];
  };
  uint64_t bytes_;
  std::vector<Line> host_;
  DeviceArray array_;
};

}  // namespace ballast::kernels
