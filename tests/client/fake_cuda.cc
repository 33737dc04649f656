#include "tests/client/fake_cuda.h"

#include <unistd.h>

#include <array>
#include <atomic>
#include <cstdlib>
#include <map>
#include <memory>
#include <mutex>

#include "tests/client/fake_cuda_memory.h"
#include "tests/client/fake_cuda_streams.h"

namespace ballast {
namespace {

using cuda::Address;
using cuda::Allocation;

struct Context {
  int retained = 0;
};

thread_local std::vector<Context*> current_contexts;

class Driver final : public FakeCuda {
 public:
  using Lock = FakeCudaStreams::Lock;
  enum class Failing { kDoesNothing, kDoesItsWork };

  static Driver& Get() {
    static auto* const driver = new Driver;  // for good: others' destructors may call
    return *driver;
  }
  // Every function of the driver's but cuGetErrorString.
  template <typename Work>
  int Call(Failing failing, const Work& work) {
    Lock lock(mu_);
    ++calls_;
    if (shut_down_) return cuda::kDeinitialized;
    if (process_ != getpid()) return cuda::kNotInitialized;
    const bool fails = until_failure_ > 0 && --until_failure_ == 0;
    if (fails && failing == Failing::kDoesNothing) return failure_;
    const int result = work(lock);
    return fails ? failure_ : result;
  }
  int Start();

  static int GetDevice(int* gpu, int ordinal);
  int Retain(void** context, int gpu);
  int Release(int gpu);
  int Push(void* context);
  static int Pop(void** context);
  int MakeStream(void** stream, unsigned flags);
  int Query(void* stream, Lock& lock);
  int Synchronize(void* stream, Lock& lock);
  int DestroyStream(void* stream, Lock& lock);
  int Give(Address to, Address from, size_t bytes, void* stream);
  int Attribute(void* data, int attribute, Address at) const;
  int Allocate(Address* at, size_t bytes);
  void DrainAll(Lock& lock) { streams_.DrainAll(CurrentGpu(), lock); }
  FakeCudaMemory& memory() { return *memory_; }

  Live live() override;
  int64_t calls() override { return calls_; }
  void FailCall(int64_t number, int error) override;
  void HoldCopies(const void* at) override;
  bool AwaitHeld() override;
  void ShutDown() override;
  void Reset() override;
  std::vector<int> current() override;
  int current_gpu() override;
  std::byte* Resolve(const void* at, uint64_t bytes, int gpu) override;
  int64_t BeginWork(void* stream, int gpu) override;
  bool AwaitTurn(int64_t work) override;
  void EndWork(int64_t work) override;

 private:
  int CurrentGpu() const;  // -1: no context is current

  std::mutex mu_;
  std::atomic<int64_t> calls_ = 0;
  int64_t until_failure_ = 0;
  int failure_ = cuda::kSuccess;
  bool shut_down_ = false;
  pid_t process_ = 0;  // that called cuInit
  std::array<Context, cuda::kGpus> contexts_;
  FakeCudaStreams streams_;
  std::unique_ptr<FakeCudaMemory> memory_ = std::make_unique<FakeCudaMemory>();
};

int Driver::Start() {
  {
    const Lock lock(mu_);
    if (process_ == 0) {
      process_ = getpid();
      std::atexit([] { Get().ShutDown(); });
    }
  }
  return Call(Failing::kDoesNothing, [](Lock&) { return cuda::kSuccess; });
}

// --- contexts -------------------------------------------------------------------------------------------------------

int Driver::GetDevice(int* gpu, int ordinal) {
  *gpu = ordinal;
  return ordinal < 0 || ordinal >= cuda::kGpus ? cuda::kInvalidDevice : cuda::kSuccess;
}

int Driver::Retain(void** context, int gpu) {
  if (gpu < 0 || gpu >= cuda::kGpus) return cuda::kInvalidDevice;
  Context& retained = contexts_[static_cast<size_t>(gpu)];
  ++retained.retained;
  *context = &retained;
  return cuda::kSuccess;
}

int Driver::Release(int gpu) {
  if (gpu < 0 || gpu >= cuda::kGpus) return cuda::kInvalidDevice;
  Context& retained = contexts_[static_cast<size_t>(gpu)];
  if (retained.retained == 0) return cuda::kInvalidContext;
  if (--retained.retained == 0) streams_.Clear(gpu);
  return cuda::kSuccess;
}

int Driver::Push(void* context) {
  for (Context& known : contexts_) {
    if (&known != context || known.retained == 0) continue;
    current_contexts.push_back(&known);
    return cuda::kSuccess;
  }
  return cuda::kInvalidContext;
}

int Driver::Pop(void** context) {
  if (current_contexts.empty()) return cuda::kInvalidContext;
  *context = current_contexts.back();
  current_contexts.pop_back();
  return cuda::kSuccess;
}

int Driver::CurrentGpu() const {
  if (current_contexts.empty() || current_contexts.back()->retained == 0) return -1;
  return static_cast<int>(current_contexts.back() - contexts_.data());
}

// --- streams --------------------------------------------------------------------------------------------------------

int Driver::MakeStream(void** stream, unsigned flags) {
  const int gpu = CurrentGpu();
  if (gpu < 0) return cuda::kInvalidContext;
  if (flags != 1) return cuda::kInvalidValue;  // one that waits for torch's default stream
  *stream = streams_.Make(gpu);
  return cuda::kSuccess;
}

int Driver::Query(void* stream, Lock& lock) {
  const int gpu = CurrentGpu();
  return gpu < 0 ? cuda::kInvalidContext : streams_.Query(stream, gpu, lock);
}

int Driver::Synchronize(void* stream, Lock& lock) {
  const int gpu = CurrentGpu();
  return gpu < 0 ? cuda::kInvalidContext : streams_.Synchronize(stream, gpu, lock);
}

int Driver::DestroyStream(void* stream, Lock& lock) {
  const int gpu = CurrentGpu();
  return gpu < 0 ? cuda::kInvalidContext : streams_.Destroy(stream, gpu, lock);
}

int Driver::Give(Address to, Address from, size_t bytes, void* stream) {
  const int gpu = CurrentGpu();
  if (gpu < 0) return cuda::kInvalidContext;
  const auto write = memory_->Resolve(to, bytes, gpu), read = memory_->Resolve(from, bytes, gpu);
  if (!write || !read || bytes == 0) return cuda::kInvalidValue;
  return streams_.Give(stream, gpu, {.to = to, .from = from, .write = *write, .read = *read, .bytes = bytes});
}

int Driver::Attribute(void* data, int attribute, Address at) const {
  if (CurrentGpu() < 0) return cuda::kInvalidContext;
  if (attribute != 2 || !memory_->IsMapped(at)) return cuda::kInvalidValue;
  *static_cast<unsigned*>(data) = 2;  // CU_MEMORYTYPE_DEVICE
  return cuda::kSuccess;
}

int Driver::Allocate(Address* at, size_t bytes) {
  const int gpu = CurrentGpu();
  return gpu < 0 ? cuda::kInvalidContext : memory_->Allocate(at, bytes, gpu);
}

// --- what tests see and set -----------------------------------------------------------------------------------------

FakeCuda::Live Driver::live() {
  const Lock lock(mu_);
  Live live;
  for (const Context& context : contexts_) live.contexts += context.retained;
  live.streams = streams_.streams();
  live.copies = streams_.copies();
  live.works = streams_.works();
  live.allocations = static_cast<int64_t>(memory_->allocations());
  live.reservations = static_cast<int64_t>(memory_->reservations());
  live.mappings = static_cast<int64_t>(memory_->mappings());
  return live;
}

void Driver::FailCall(int64_t number, int error) {
  const Lock lock(mu_);
  until_failure_ = number;
  failure_ = error;
}

void Driver::HoldCopies(const void* at) {
  const Lock lock(mu_);
  streams_.Hold(reinterpret_cast<Address>(at));
}

bool Driver::AwaitHeld() {
  Lock lock(mu_);
  return streams_.AwaitHeld(lock);
}

void Driver::ShutDown() {
  const Lock lock(mu_);
  shut_down_ = true;
}

void Driver::Reset() {
  const Lock lock(mu_);
  streams_.Clear();
  memory_ = std::make_unique<FakeCudaMemory>();
  contexts_ = {};
  until_failure_ = 0;
  shut_down_ = false;
}

std::vector<int> Driver::current() {
  std::vector<int> gpus;
  for (const Context* context : current_contexts) gpus.push_back(static_cast<int>(context - contexts_.data()));
  return gpus;
}

// --- for a fake NCCL ------------------------------------------------------------------------------------------------

int Driver::current_gpu() {
  const Lock lock(mu_);
  return shut_down_ || process_ != getpid() ? -1 : CurrentGpu();
}

std::byte* Driver::Resolve(const void* at, uint64_t bytes, int gpu) {
  const Lock lock(mu_);
  return memory_->Resolve(reinterpret_cast<Address>(at), bytes, gpu).value_or(nullptr);
}

int64_t Driver::BeginWork(void* stream, int gpu) {
  const Lock lock(mu_);
  return streams_.BeginWork(stream, gpu);
}

bool Driver::AwaitTurn(int64_t work) {
  Lock lock(mu_);
  return streams_.AwaitTurn(work, lock);
}

void Driver::EndWork(int64_t work) {
  const Lock lock(mu_);
  streams_.EndWork(work);
}

}  // namespace
}  // namespace ballast

// --- the library's functions ----------------------------------------------------------------------------------------

using ballast::Driver;
using ballast::cuda::Access;
using ballast::cuda::Address;
using ballast::cuda::Allocation;

namespace {

template <typename Work>
int Do(const Work& work) {
  return Driver::Get().Call(Driver::Failing::kDoesNothing, [&](Driver::Lock&) { return work(Driver::Get()); });
}
// For what tells of earlier failures.
template <typename Work>
int DoInAnyCase(const Work& work) {
  return Driver::Get().Call(Driver::Failing::kDoesItsWork,
                            [&](Driver::Lock& lock) { return work(Driver::Get(), lock); });
}

}  // namespace

extern "C" {

ballast::FakeCuda* FakeCudaOfTests() { return &Driver::Get(); }

int cuGetErrorString(int error, const char** text) {
  static const std::map<int, const char*> texts = {{ballast::cuda::kInvalidValue, "invalid argument"},
                                                   {ballast::cuda::kOutOfMemory, "out of memory"},
                                                   {ballast::cuda::kInvalidDevice, "invalid device ordinal"}};
  const auto found = texts.find(error);
  *text = found == texts.end() ? nullptr : found->second;
  return found == texts.end() ? ballast::cuda::kInvalidValue : ballast::cuda::kSuccess;
}

int cuInit(unsigned) { return Driver::Get().Start(); }
int cuDeviceGet(int* gpu, int ordinal) {
  return Do([&](Driver& driver) { return driver.GetDevice(gpu, ordinal); });
}
int cuDevicePrimaryCtxRetain(void** context, int gpu) {
  return Do([&](Driver& driver) { return driver.Retain(context, gpu); });
}
int cuDevicePrimaryCtxRelease_v2(int gpu) {
  return DoInAnyCase([&](Driver& driver, Driver::Lock&) { return driver.Release(gpu); });
}
int cuCtxPushCurrent_v2(void* context) {
  return Do([&](Driver& driver) { return driver.Push(context); });
}
int cuCtxPopCurrent_v2(void** context) {
  return DoInAnyCase([&](Driver&, Driver::Lock&) { return Driver::Pop(context); });
}

int cuStreamCreate(void** stream, unsigned flags) {
  return Do([&](Driver& driver) { return driver.MakeStream(stream, flags); });
}
int cuStreamSynchronize(void* stream) {
  return DoInAnyCase([&](Driver& driver, Driver::Lock& lock) { return driver.Synchronize(stream, lock); });
}
int cuStreamQuery(void* stream) {
  return DoInAnyCase([&](Driver& driver, Driver::Lock& lock) { return driver.Query(stream, lock); });
}
int cuStreamDestroy_v2(void* stream) {
  return DoInAnyCase([&](Driver& driver, Driver::Lock& lock) { return driver.DestroyStream(stream, lock); });
}
int cuMemcpyAsync(Address to, Address from, size_t bytes, void* stream) {
  return DoInAnyCase([&](Driver& driver, Driver::Lock&) { return driver.Give(to, from, bytes, stream); });
}

int cuPointerGetAttribute(void* data, int attribute, Address at) {
  return Do([&](Driver& driver) { return driver.Attribute(data, attribute, at); });
}
int cuMemImportFromShareableHandle(Allocation* allocation, void* handle, int type) {
  return Do([&](Driver& driver) { return driver.memory().Import(allocation, handle, type); });
}
int cuMemRelease(Allocation allocation) {
  return DoInAnyCase([&](Driver& driver, Driver::Lock&) { return driver.memory().Drop(allocation); });
}
int cuMemAddressReserve(Address* at, size_t bytes, size_t, Address, unsigned long long) {
  return Do([&](Driver& driver) { return driver.memory().Reserve(at, bytes); });
}
int cuMemAddressFree(Address at, size_t bytes) {
  return DoInAnyCase([&](Driver& driver, Driver::Lock&) { return driver.memory().Unreserve(at, bytes); });
}
int cuMemMap(Address at, size_t bytes, size_t offset, Allocation allocation, unsigned long long) {
  return Do([&](Driver& driver) { return driver.memory().Map(at, bytes, offset, allocation); });
}
int cuMemUnmap(Address at, size_t bytes) {
  return DoInAnyCase([&](Driver& driver, Driver::Lock& lock) {
    driver.DrainAll(lock);
    return driver.memory().Unmap(at, bytes);
  });
}
int cuMemSetAccess(Address at, size_t bytes, const Access* access, size_t count) {
  return Do([&](Driver& driver) { return driver.memory().SetAccess(at, bytes, access, count); });
}
int cuMemAlloc_v2(Address* at, size_t bytes) {
  return Do([&](Driver& driver) { return driver.Allocate(at, bytes); });
}
int cuMemFree_v2(Address at) {
  return DoInAnyCase([&](Driver& driver, Driver::Lock& lock) {
    driver.DrainAll(lock);
    return driver.memory().Free(at);
  });
}

}  // extern "C"
