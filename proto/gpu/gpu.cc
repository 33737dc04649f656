#include "proto/gpu/gpu.h"

#include <dlfcn.h>
#include <unistd.h>

#include <atomic>
#include <type_traits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "proto/loaded_function.h"

namespace ballast {
namespace {

// The process in which the driver was started: it does not work in forks of that.
std::atomic<pid_t> cuda_process{0};

absl::Status IsFork() {
  return absl::FailedPreconditionError(
      "this process is a fork of one that used CUDA, which does not work in a fork: use the GPU in a process that is "
      "started anew (in Python multiprocessing.get_context('spawn'))");
}

}  // namespace

// What is used of the driver's interface, by the names that the library exports. The newest of them is
// cuDevicePrimaryCtxRelease_v2, of CUDA 11.0; those of memory by descriptor came with 10.2.
struct Gpu::Driver {
  using Address = unsigned long long;  // CUdeviceptr
  static Address AddressOf(const void* at) { return reinterpret_cast<Address>(at); }
  using Allocation = unsigned long long;  // CUmemGenericAllocationHandle
  struct Access {                         // CUmemAccessDesc
    int location_type = 1;                // CU_MEM_LOCATION_TYPE_DEVICE
    int device = 0;
    int flags = 3;  // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
  };
  enum Error {  // CUresult
    kSuccess = 0,
    kInvalidValue = 1,
    kOutOfMemory = 2,
    kNotInitialized = 3,
    kDeinitialized = 4,
    kNoDevice = 100,
    kInvalidDevice = 101,
    kNotReady = 600,
  };
  static absl::StatusCode CodeOf(int error) {
    if (error == kOutOfMemory) return absl::StatusCode::kResourceExhausted;
    const bool is_none = error == kNoDevice || error == kInvalidDevice;
    return is_none ? absl::StatusCode::kNotFound : absl::StatusCode::kInternal;
  }
  static constexpr int kFileDescriptor = 1;    // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
  static constexpr int kMemoryType = 2;        // CU_POINTER_ATTRIBUTE_MEMORY_TYPE
  static constexpr unsigned kHostMemory = 1;   // CU_MEMORYTYPE_HOST
  static constexpr unsigned kNonBlocking = 1;  // CU_STREAM_NON_BLOCKING: waits for no other stream

  template <typename... Args>
  using Function = LoadedFunction<int, Args...>;

  Driver(void* opened, int ordinal) : library(opened), label(absl::StrCat("cuda:", ordinal)) {}

  absl::Status Check(int error, const char* name) const {
    if (error == kSuccess) return absl::OkStatus();
    const char* text = nullptr;
    error_text.call(error, &text);
    return {CodeOf(error),
            absl::StrCat(name, " on ", label, ": ", text == nullptr ? "unknown" : text, " (error ", error, ")")};
  }
  template <typename... Args>
  absl::Status Call(const LoadedFunction<int, Args...>& function, std::type_identity_t<Args>... args) const {
    return Check(function.call(args...), function.name);
  }

  void* const library;  // never closed: it may have threads
  const std::string label;
  const char* lacks = nullptr;  // a function's name
  Function<int, const char**> error_text{this, "cuGetErrorString"};
  Function<unsigned> init{this, "cuInit"};
  Function<int*, int> get_device{this, "cuDeviceGet"};
  Function<void**, int> retain{this, "cuDevicePrimaryCtxRetain"};
  Function<int> release{this, "cuDevicePrimaryCtxRelease_v2"};
  Function<void*> push{this, "cuCtxPushCurrent_v2"};
  Function<void**> pop{this, "cuCtxPopCurrent_v2"};
  Function<void**, unsigned> make_stream{this, "cuStreamCreate"};
  Function<void*> synchronize{this, "cuStreamSynchronize"};
  Function<void*> query{this, "cuStreamQuery"};
  Function<void*> destroy_stream{this, "cuStreamDestroy_v2"};
  Function<Address, Address, size_t, void*> copy{this, "cuMemcpyAsync"};
  Function<void*, int, Address> attribute{this, "cuPointerGetAttribute"};
  Function<Address*, size_t> allocate{this, "cuMemAlloc_v2"};
  Function<Address> free{this, "cuMemFree_v2"};
  Function<Allocation*, void*, int> import_memory{this, "cuMemImportFromShareableHandle"};
  Function<Allocation> drop{this, "cuMemRelease"};
  Function<Address*, size_t, size_t, Address, unsigned long long> reserve{this, "cuMemAddressReserve"};
  Function<Address, size_t> unreserve{this, "cuMemAddressFree"};
  Function<Address, size_t, size_t, Allocation, unsigned long long> map{this, "cuMemMap"};
  Function<Address, size_t> unmap{this, "cuMemUnmap"};
  Function<Address, size_t, const Access*, size_t> set_access{this, "cuMemSetAccess"};
};

absl::StatusOr<std::shared_ptr<Gpu>> Gpu::Open(int ordinal, const char* driver) {
  if (const pid_t first = cuda_process; first != 0 && first != getpid()) return IsFork();
  void* const library = dlopen(driver, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return absl::NotFoundError(absl::StrCat("there is no CUDA driver, ", dlerror()));
  auto found = std::make_unique<const Driver>(library, ordinal);
  if (found->lacks != nullptr) {
    return absl::FailedPreconditionError(absl::StrCat("the CUDA driver, ", driver, ", has no ", found->lacks,
                                                      ": install one of CUDA 11.0 (450.36) or later"));
  }
  std::shared_ptr<Gpu> gpu(new Gpu(std::move(found)));
  absl::Status kept = gpu->Retain(ordinal);
  if (kept.ok()) return gpu;
  if (!absl::IsNotFound(kept)) return kept;
  return absl::NotFoundError(
      absl::StrCat(kept.message(), ": there is no such GPU, or CUDA_VISIBLE_DEVICES hides it from this process"));
}

Gpu::Gpu(std::unique_ptr<const Driver> driver) : driver_(std::move(driver)), process_(getpid()) {}

Gpu::~Gpu() {
  if (context_ == nullptr || getpid() != process_) return;
  const auto destroy = [this]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
    for (void* const stream : idle_) driver_->Call(driver_->destroy_stream, stream).IgnoreError();
    return absl::OkStatus();
  };
  InContext(destroy, true).IgnoreError();
  driver_->Call(driver_->release, device_).IgnoreError();
}

absl::Status Gpu::Retain(int ordinal) {
  const int error = driver_->init.call(0);
  if (error == Driver::kNotInitialized) return IsFork();  // of a process where others used it
  if (auto s = driver_->Check(error, driver_->init.name); !s.ok()) return s;
  cuda_process = process_;
  if (auto s = driver_->Call(driver_->get_device, &device_, ordinal); !s.ok()) return s;
  void* context = nullptr;
  if (auto s = driver_->Call(driver_->retain, &context, device_); !s.ok()) return s;
  context_ = context;
  return absl::OkStatus();
}

absl::Status Gpu::CheckNotFork() const { return getpid() == process_ ? absl::OkStatus() : IsFork(); }

absl::Status Gpu::InContext(absl::FunctionRef<absl::Status()> call, bool anyway) const {
  const int error = driver_->push.call(context_);
  absl::Status status = driver_->Check(error, driver_->push.name);
  const bool pushed = error == Driver::kSuccess;
  if (pushed || (anyway && error != Driver::kDeinitialized)) status.Update(call());
  void* popped = nullptr;
  if (pushed) status.Update(driver_->Call(driver_->pop, &popped));
  return status;
}

absl::StatusOr<std::unique_ptr<Gpu::Memory>> Gpu::Import(int fd, uint64_t bytes) {
  if (auto s = CheckNotFork(); !s.ok()) return s;
  std::unique_ptr<Memory> memory(new Memory(shared_from_this(), bytes));
  const absl::Status mapped = InContext([&] { return memory->Map(fd); });
  if (mapped.ok()) return memory;
  if (absl::IsResourceExhausted(mapped)) return mapped;
  return absl::FailedPreconditionError(absl::StrCat(
      driver_->label, " cannot reach the daemon's GPU memory: ", mapped.message(),
      "; it must be the daemon's GPU, or have peer access to it, and CUDA_VISIBLE_DEVICES must not hide that one"));
}

absl::Status Gpu::Memory::Map(int fd) {
  const Driver& driver = *gpu_->driver_;
  Driver::Allocation allocation = 0;
  void* const handle = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  if (auto s = driver.Call(driver.import_memory, &allocation, handle, Driver::kFileDescriptor); !s.ok()) return s;
  Driver::Address address = 0;
  absl::Status mapped = driver.Call(driver.reserve, &address, bytes_, 0, 0, 0);
  if (mapped.ok()) {
    address_ = address;
    mapped = driver.Call(driver.map, address, bytes_, 0, allocation, 0);
    mapped_ = mapped.ok();
  }
  mapped.Update(driver.Call(driver.drop, allocation));  // the mapping keeps the memory
  if (!mapped.ok()) return mapped;
  const Driver::Access access{.device = gpu_->device_};
  return driver.Call(driver.set_access, address, bytes_, &access, 1);
}

absl::StatusOr<std::unique_ptr<Gpu::Memory>> Gpu::Allocate(uint64_t bytes) {
  if (auto s = CheckNotFork(); !s.ok()) return s;
  std::unique_ptr<Memory> memory(new Memory(shared_from_this(), bytes));
  if (auto s = InContext([&] { return memory->Take(); }); !s.ok()) return s;
  return memory;
}

absl::Status Gpu::Memory::Take() {
  const Driver& driver = *gpu_->driver_;
  Driver::Address address = 0;
  if (auto s = driver.Call(driver.allocate, &address, bytes_); !s.ok()) return s;
  address_ = address;
  own_ = true;
  return absl::OkStatus();
}

Gpu::Memory::~Memory() {
  if (address_ == 0 || getpid() != gpu_->process_) return;
  const auto unmap = [this] {
    const Driver& driver = *gpu_->driver_;
    if (own_) return driver.Call(driver.free, address_);
    if (mapped_) driver.Call(driver.unmap, address_, bytes_).IgnoreError();
    driver.Call(driver.unreserve, address_, bytes_).IgnoreError();
    return absl::OkStatus();
  };
  gpu_->InContext(unmap, true).IgnoreError();
}

bool Gpu::Owns(const void* at) const {
  if (getpid() != process_) return true;
  unsigned type = Driver::kHostMemory;
  int error = Driver::kSuccess;
  const absl::Status asked = InContext([&] {
    error = driver_->attribute.call(&type, Driver::kMemoryType, Driver::AddressOf(at));
    return absl::OkStatus();
  });
  if (!asked.ok()) return true;
  return error == Driver::kSuccess ? type != Driver::kHostMemory : error != Driver::kInvalidValue;
}

absl::Status Gpu::Copy(void* to, const void* from, uint64_t bytes) {
  if (auto s = CheckNotFork(); !s.ok() || bytes == 0) return s;
  return InContext([&]() -> absl::Status {
    const auto stream = TakeStream();
    if (!stream.ok()) return stream.status();
    absl::Status done = driver_->Call(driver_->copy, Driver::AddressOf(to), Driver::AddressOf(from), bytes, *stream);
    // In any case: the failure may be an earlier one, and the copy under way.
    done.Update(driver_->Call(driver_->synchronize, *stream));
    absl::MutexLock lock(&mu_);
    idle_.push_back(*stream);
    return done;
  });
}

absl::StatusOr<std::unique_ptr<Gpu::Stream>> Gpu::NewStream() {
  if (auto s = CheckNotFork(); !s.ok()) return s;
  void* handle = nullptr;
  const auto make = [&] { return driver_->Call(driver_->make_stream, &handle, Driver::kNonBlocking); };
  if (auto s = InContext(make); !s.ok()) return s;
  return std::unique_ptr<Stream>(new Stream(shared_from_this(), handle));
}

absl::StatusOr<bool> Gpu::Stream::Done() const {
  if (auto s = gpu_->CheckNotFork(); !s.ok()) return s;
  const Driver& driver = *gpu_->driver_;
  int error = Driver::kSuccess;
  const absl::Status asked = gpu_->InContext([&] {
    error = driver.query.call(handle_);
    return error == Driver::kNotReady ? absl::OkStatus() : driver.Check(error, driver.query.name);
  });
  if (!asked.ok()) return asked;
  return error == Driver::kSuccess;
}

Gpu::Stream::~Stream() {
  if (getpid() != gpu_->process_) return;
  const Driver& driver = *gpu_->driver_;
  const auto end = [&] {
    driver.Call(driver.synchronize, handle_).IgnoreError();
    return driver.Call(driver.destroy_stream, handle_);
  };
  gpu_->InContext(end, true).IgnoreError();
}

absl::StatusOr<void*> Gpu::TakeStream() {
  {
    absl::MutexLock lock(&mu_);
    if (!idle_.empty()) {
      void* const stream = idle_.back();
      idle_.pop_back();
      return stream;
    }
  }
  void* stream = nullptr;
  if (auto s = driver_->Call(driver_->make_stream, &stream, Driver::kNonBlocking); !s.ok()) return s;
  return stream;
}

}  // namespace ballast
