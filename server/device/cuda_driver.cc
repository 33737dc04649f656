// A GPU by way of the CUDA runtime, which is linked statically and finds the driver when it is first called.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <filesystem>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/synchronization/mutex.h"

#include "server/base/status_macros.h"
#include "server/device/cuda_shared_memory.h"
#include "server/device/gpu_discovery.h"

namespace ballast {
namespace {

using kernels::DeviceCopy;
using kernels::DeviceUpdate;

std::string Gibibytes(uint64_t bytes) { return absl::StrFormat("%.1f GiB", static_cast<double>(bytes) / (1ULL << 30)); }

class CudaDriver final : public GpuDriver {
 public:
  CudaDriver(uint32_t number, std::string model) : number_(number), model_(std::move(model)) {}
  ~CudaDriver() override {
    Use();
    orthogonalizer_.reset();  // before its stream
    for (const cudaEvent_t event : events_) {
      if (event != nullptr) cudaEventDestroy(event);
    }
    for (const cudaStream_t stream : streams_) {
      if (stream != nullptr) cudaStreamDestroy(stream);
    }
    if (reading_ != nullptr) cudaStreamDestroy(reading_);
  }
  absl::Status Open() {
    Use();
    // The copies' streams first: a kernel that fills the GPU must not hold them up.
    int least = 0, greatest = 0;
    Check(cudaDeviceGetStreamPriorityRange(&least, &greatest), "cudaDeviceGetStreamPriorityRange");
    for (int s = 0; s < kStreams; ++s) {
      const int priority = s == static_cast<int>(Stream::kCompute) ? least : greatest;
      Check(cudaStreamCreateWithPriority(&streams_[static_cast<size_t>(s)], cudaStreamNonBlocking, priority),
            "cudaStreamCreate");
    }
    Check(cudaStreamCreateWithPriority(&reading_, cudaStreamNonBlocking, greatest), "cudaStreamCreate");
    size_t free = 0, total = 0;
    Check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    total_bytes_ = total;
    return status();
  }

  int number() const override { return static_cast<int>(number_); }
  std::string label() const override { return absl::StrCat("cuda:", number_); }
  std::string name() const override { return absl::StrCat(label(), ", ", model_, ", ", Gibibytes(total_bytes_)); }
  uint64_t memory_bytes() const override { return total_bytes_; }

  absl::StatusOr<std::byte*> Allocate(uint64_t bytes, Memory memory) override;
  void Free(std::byte* data, Memory memory) override {
    Use();
    memory == Memory::kPinned ? Check(cudaFreeHost(data), "cudaFreeHost") : Check(cudaFree(data), "cudaFree");
  }

  absl::StatusOr<Shared> AllocateShared(uint64_t bytes) override;
  void FreeShared(const Shared& shared) override {
    Use();
    FreeSharedMemory(shared);
  }
  void Read(void* to, const void* from, uint64_t bytes) override {
    absl::MutexLock lock(&read_mu_);
    Use();
    Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToHost, reading_), "cudaMemcpyAsync");
    Check(cudaStreamSynchronize(reading_), "cudaStreamSynchronize");
  }

  void Copy(Stream stream, void* to, const void* from, uint64_t bytes) override {
    Use();
    if (bytes > 0) Check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, Of(stream)), "cudaMemcpyAsync");
  }
  void Zero(Stream stream, void* to, uint64_t bytes) override {
    Use();
    Check(cudaMemsetAsync(to, 0, bytes, Of(stream)), "cudaMemsetAsync");
  }
  void Update(size_t kernel, DeviceUpdate* batch, int count, uint64_t tiles, bool ordinary) override {
    Use();
    Launched(kernels::CudaKernels()[kernel].update(batch, count, tiles, ordinary, Of(Stream::kCompute)), "the update");
  }
  void Direct(size_t kernel, const DeviceUpdate* batch, int count, uint64_t tiles) override {
    Use();
    Launched(kernels::CudaKernels()[kernel].direct(batch, count, tiles, Of(Stream::kCompute)),
             "the first pass of an update");
  }
  absl::StatusOr<std::string> MatrixProducts() override;
  void Orthogonalize(const kernels::DeviceMatrix& matrix) override {
    Use();
    if (const std::string why = orthogonalizer_->Run(matrix); !why.empty()) Fail("making a matrix orthogonal", why);
  }
  void Sum(const kernels::DeviceSum* batch, int count, uint64_t tiles) override {
    Use();
    Launched(kernels::CudaSum(batch, count, tiles, Of(Stream::kCompute)), "summing");
  }
  void Measure(const kernels::DeviceGradient* batch, int count, uint64_t tiles) override {
    Use();
    Launched(kernels::CudaMeasure(batch, count, tiles, Of(Stream::kCompute)), "measuring");
  }
  void ProbeCurvature(size_t kernel, const kernels::DeviceCurvature* batch, int count, uint64_t tiles) override {
    Use();
    Launched(kernels::CudaKernels()[kernel].curvature(batch, count, tiles, Of(Stream::kCompute)), "a curvature probe");
  }
  void MoveAverages(size_t master, const kernels::DeviceAverage* batch, int count, uint64_t tiles) override {
    Use();
    Launched(kernels::CudaMasters()[master].average(batch, count, tiles, Of(Stream::kCompute)), "averaging");
  }
  void Load(size_t master, const DeviceCopy* batch, int count, uint64_t tiles, kernels::WireIndex format) override {
    Use();
    Launched(kernels::CudaMasters()[master].load(batch, count, tiles, format, Of(Stream::kCompute)), "a load");
  }
  void EncodeWeights(size_t master, const DeviceCopy* batch, int count, uint64_t tiles,
                     kernels::WireIndex format) override {
    Use();
    Launched(kernels::CudaMasters()[master].encode_weights(batch, count, tiles, format, Of(Stream::kCompute)),
             "serving");
  }
  void RaiseScales(size_t master, const DeviceCopy* batch, int count, uint64_t tiles) override {
    Use();
    Launched(kernels::CudaMasters()[master].raise_scales(batch, count, tiles, Of(Stream::kCompute)), "scales");
  }

  absl::StatusOr<Event> NewEvent() override {
    Use();
    cudaEvent_t event = nullptr;
    Check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming | cudaEventBlockingSync), "cudaEventCreate");
    absl::MutexLock lock(&mu_);
    if (!status_.ok()) return status_;
    const auto number = static_cast<size_t>(std::find(events_.begin(), events_.end(), nullptr) - events_.begin());
    if (number == events_.size()) events_.emplace_back();
    events_[number] = event;
    return static_cast<Event>(number);
  }
  void FreeEvent(Event event) override {
    Use();
    cudaEvent_t freed = nullptr;
    {
      absl::MutexLock lock(&mu_);
      std::swap(freed, events_[static_cast<size_t>(event)]);
    }
    Check(cudaEventDestroy(freed), "cudaEventDestroy");
  }
  void Record(Event event, Stream stream) override {
    Use();
    Check(cudaEventRecord(Of(event), Of(stream)), "cudaEventRecord");
  }
  void Wait(Stream stream, Event event) override {
    Use();
    Check(cudaStreamWaitEvent(Of(stream), Of(event), 0), "cudaStreamWaitEvent");
  }
  absl::Status Await(Event event) override {
    Use();
    Check(cudaEventSynchronize(Of(event)), "cudaEventSynchronize");
    return status();
  }

 private:
  // The current device is the thread's.
  void Use() const { cudaSetDevice(static_cast<int>(number_)); }
  cudaStream_t Of(Stream stream) const { return streams_[static_cast<size_t>(stream)]; }
  cudaEvent_t Of(Event event) {
    absl::MutexLock lock(&mu_);
    return events_[static_cast<size_t>(event)];
  }
  absl::Status status() {
    absl::MutexLock lock(&mu_);
    return status_;
  }
  // Keeps the first failure: a failed context answers every later call with the same error.
  void Fail(const char* call, absl::string_view why) {
    absl::MutexLock lock(&mu_);
    if (!status_.ok()) return;
    status_ = absl::InternalError(absl::StrCat(label(), " (", model_, ") failed in ", call, ": ", why));
  }
  void Check(cudaError_t error, const char* call) {
    if (error == cudaSuccess) return;
    Fail(call, absl::StrCat(cudaGetErrorString(error), " (", cudaGetErrorName(error), ")"));
  }
  void Launched(int error, const char* what) { Check(static_cast<cudaError_t>(error), what); }

  const uint32_t number_;
  const std::string model_;
  uint64_t total_bytes_ = 0;
  std::array<cudaStream_t, kStreams> streams_ = {};
  absl::Mutex read_mu_;  // one at a time
  cudaStream_t reading_ = nullptr;
  absl::Mutex mu_;
  std::deque<cudaEvent_t> events_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  absl::Mutex products_mu_;
  std::unique_ptr<kernels::CudaOrthogonalizer> orthogonalizer_;  // written once, before it is used
};

absl::StatusOr<std::byte*> CudaDriver::Allocate(uint64_t bytes, Memory memory) {
  Use();
  void* data = nullptr;
  const bool pinned = memory == Memory::kPinned;
  const cudaError_t error = pinned ? cudaHostAlloc(&data, bytes, cudaHostAllocPortable) : cudaMalloc(&data, bytes);
  if (error != cudaSuccess) {
    cudaGetLastError();  // a refusal is no failure of the device
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    return absl::ResourceExhaustedError(
        pinned ? absl::StrCat("the system refused ", bytes, " bytes of pinned host memory: ", cudaGetErrorString(error))
               : absl::StrCat(label(), " has ", free, " bytes free of ", total, ", and ", bytes,
                              " were asked for: ", cudaGetErrorString(error)));
  }
  if (pinned) {
    std::memset(data, 0, bytes);
  } else {
    Check(cudaMemset(data, 0, bytes), "cudaMemset");
    Check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
  }
  return static_cast<std::byte*>(data);
}

absl::StatusOr<GpuDriver::Shared> CudaDriver::AllocateShared(uint64_t bytes) {
  Use();
  ASSIGN_OR_RETURN(const Shared shared, AllocateSharedMemory(static_cast<int>(number_), bytes));
  Check(cudaMemset(shared.data, 0, shared.bytes), "cudaMemset");
  Check(cudaStreamSynchronize(cudaStreamLegacy), "cudaStreamSynchronize");
  return shared;
}

absl::StatusOr<std::string> CudaDriver::MatrixProducts() {
  absl::MutexLock lock(&products_mu_);
  Use();
  if (orthogonalizer_ == nullptr) {
    std::string why;
    orthogonalizer_ = kernels::CudaOrthogonalizer::Open(Of(Stream::kCompute), &why);
    if (orthogonalizer_ == nullptr) return absl::FailedPreconditionError(absl::StrCat(label(), ": ", why));
  }
  return absl::StrCat(orthogonalizer_->library(), " on ", model_);
}

absl::Status NoGpu() { return absl::NotFoundError("no GPU found"); }

}  // namespace

GpuSurvey SurveyGpus() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) {
    std::error_code ignored;
    if (!std::filesystem::exists("/proc/driver/nvidia/version", ignored)) return {.why_none = NoGpu()};
    int driver = 0;
    cudaDriverGetVersion(&driver);
    return {.why_none = absl::FailedPreconditionError(
                error == cudaErrorInsufficientDriver ? WhyDriverIsTooOld(driver, CUDART_VERSION)
                                                     : absl::StrCat("no usable GPU: ", cudaGetErrorString(error)))};
  }
  GpuSurvey survey;
  if (count == 0) survey.why_none = NoGpu();
  for (int i = 0; i < count; ++i) {
    cudaDeviceProp properties{};
    const bool known = cudaGetDeviceProperties(&properties, i) == cudaSuccess;
    survey.names.push_back(known ? properties.name : "a GPU that does not answer");
  }
  return survey;
}

absl::StatusOr<std::unique_ptr<GpuDriver>> OpenGpu(uint32_t number) {
  const GpuSurvey survey = SurveyGpus();
  if (survey.names.empty()) return survey.why_none;
  if (number >= survey.names.size()) {
    return absl::NotFoundError(absl::StrCat("this machine has cuda:0 to cuda:", survey.names.size() - 1, " (",
                                            absl::StrJoin(survey.names, ", "), ")"));
  }
  int capability = 0;
  cudaDeviceGetAttribute(&capability, cudaDevAttrComputeCapabilityMajor, static_cast<int>(number));
  if (capability < 8) {
    return absl::FailedPreconditionError(absl::StrCat(
        "cuda:", number, " (", survey.names[number], ") has compute capability ", capability, ".x, and 8.0 is needed"));
  }
  auto gpu = std::make_unique<CudaDriver>(number, survey.names[number]);
  if (absl::Status status = gpu->Open(); !status.ok()) return status;
  return gpu;
}

}  // namespace ballast
