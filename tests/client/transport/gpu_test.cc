// The trainer's access to its GPU, on a driver that the tests play (fake_cuda.h), whose memory and contexts are counted.
#include "proto/gpu/gpu.h"

#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cstdlib>
#include <string>
#include <thread>

#include "absl/strings/str_cat.h"
#include "absl/synchronization/notification.h"
#include "absl/time/time.h"

#include "tests/client/fake_cuda.h"
#include "tests/client/in_fork.h"

namespace ballast {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kBlock = 2 << 20;  // bytes: the granularity
constexpr int kUnknown = 999;         // CUDA_ERROR_UNKNOWN

template <typename Function>
Function* InFakeCuda(const char* name) {
  static void* const library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

// Memory of a daemon's GPU, as it lends it: its end sees it through the descriptor.
class Lent {
 public:
  explicit Lent(uint64_t bytes = kBlock) : fd_(memfd_create("lent", MFD_CLOEXEC)) {
    EXPECT_EQ(ftruncate(fd_, static_cast<off_t>(bytes)), 0);
  }
  ~Lent() { close(fd_); }
  int fd() const { return fd_; }
  std::string Read(uint64_t at, uint64_t bytes) const {
    std::string read(bytes, '?');
    EXPECT_EQ(pread(fd_, read.data(), bytes, static_cast<off_t>(at)), static_cast<ssize_t>(bytes));
    return read;
  }
  void Write(uint64_t at, const std::string& bytes) const {
    EXPECT_EQ(pwrite(fd_, bytes.data(), bytes.size(), static_cast<off_t>(at)), static_cast<ssize_t>(bytes.size()));
  }

 private:
  const int fd_;
};

class GpuTest : public ::testing::Test {
 protected:
  GpuTest() { cuda_.Reset(); }
  ~GpuTest() override {
    EXPECT_EQ(cuda_.live(), FakeCuda::Live());
    EXPECT_THAT(cuda_.current(), IsEmpty());
  }

  static std::shared_ptr<Gpu> Open(int ordinal = 0) { return Gpu::Open(ordinal, FAKE_CUDA).value(); }
  // A trainer's use of a GPU from its beginning to before its end; `calls`: how many calls it took.
  absl::Status Use(int64_t* calls) {
    const int64_t before = cuda_.calls();
    const Lent lent;
    auto gpu = Gpu::Open(0, FAKE_CUDA);
    if (!gpu.ok()) return gpu.status();
    auto memory = (*gpu)->Import(lent.fd(), kBlock);
    if (!memory.ok()) return memory.status();
    for (int i = 0; i < 2; ++i) {
      const std::string written(100, static_cast<char>('a' + i));
      std::string read(100, '?');
      const absl::Status to = (*gpu)->Copy((*memory)->data(), written.data(), written.size());
      const absl::Status from = (*gpu)->Copy(read.data(), (*memory)->data(), read.size());
      if (cuda_.live().copies > 0) return absl::DataLossError("a copy is still under way");
      if (!to.ok()) return to;
      if (!from.ok()) return from;
      if (read != written) return absl::DataLossError("other bytes came back");
      if ((*gpu)->Owns(read.data())) return absl::UnknownError("a GPU owns the host's memory");
    }
    *calls = cuda_.calls() - before;
    return absl::OkStatus();
  }

  FakeCuda& cuda_ = *InFakeCuda<FakeCuda*()>("FakeCudaOfTests")();
};

TEST_F(GpuTest, CopiesBetweenTheHostAndTheMemoryOfGpus) {
  const Lent gradients(2 * kBlock), weights;
  const auto gpu = Open();
  const auto up = gpu->Import(gradients.fd(), 2 * kBlock).value();
  const auto down = gpu->Import(weights.fd(), kBlock).value();
  EXPECT_EQ(up->bytes(), 2 * kBlock);

  const std::string gradient(3000, 'g');
  ASSERT_TRUE(gpu->Copy(up->data() + kBlock - 1000, gradient.data(), gradient.size()).ok());
  EXPECT_EQ(gradients.Read(kBlock - 1001, 3002), absl::StrCat(std::string(1, '\0'), gradient, std::string(1, '\0')));

  weights.Write(7, "new weights");
  std::string read(11, '?');
  ASSERT_TRUE(gpu->Copy(read.data(), down->data() + 7, read.size()).ok());
  EXPECT_EQ(read, "new weights");

  ASSERT_TRUE(gpu->Copy(up->data(), down->data() + 7, read.size()).ok());
  EXPECT_EQ(gradients.Read(0, read.size()), read);

  std::string host(11, '?');
  ASSERT_TRUE(gpu->Copy(host.data(), read.data(), read.size()).ok());
  EXPECT_EQ(host, read);
  const int64_t calls = cuda_.calls();
  EXPECT_TRUE(gpu->Copy(nullptr, nullptr, 0).ok());
  EXPECT_EQ(cuda_.calls(), calls);
}

TEST_F(GpuTest, TheDescriptorStaysTheCallersAndTheMemoryLivesWithoutIt) {
  const auto gpu = Open();
  std::unique_ptr<Gpu::Memory> first, second;
  {
    const Lent lent;
    first = gpu->Import(lent.fd(), kBlock).value();
    second = gpu->Import(lent.fd(), kBlock).value();
    lent.Write(0, "lent");
  }
  std::string read(4, '?');
  first.reset();
  ASSERT_TRUE(gpu->Copy(read.data(), second->data(), read.size()).ok());
  EXPECT_EQ(read, "lent");
}

TEST_F(GpuTest, OwnsWhatIsMappedAndWhatTorchAllocated) {
  const Lent lent;
  const auto gpu = Open();
  auto memory = gpu->Import(lent.fd(), kBlock).value();
  std::byte* const data = memory->data();
  const auto heap = std::make_unique<int>(0);
  EXPECT_TRUE(gpu->Owns(data));
  EXPECT_TRUE(gpu->Owns(data + kBlock - 1));
  EXPECT_FALSE(gpu->Owns(&memory));
  EXPECT_FALSE(gpu->Owns(heap.get()));
  EXPECT_FALSE(gpu->Owns(nullptr));
  // The host cannot read it.
  int ends[2] = {};
  ASSERT_EQ(pipe(ends), 0);
  EXPECT_EQ(write(ends[1], data, 1), -1);
  close(ends[0]);
  close(ends[1]);
  memory.reset();
  EXPECT_FALSE(gpu->Owns(data));
}

TEST_F(GpuTest, TorchsTensorsAreItsOwnAndItsContextStaysCurrent) {
  void* context = nullptr;
  unsigned long long tensor = 0;
  ASSERT_EQ(InFakeCuda<int(unsigned)>("cuInit")(0), 0);
  ASSERT_EQ(InFakeCuda<int(void**, int)>("cuDevicePrimaryCtxRetain")(&context, 1), 0);
  ASSERT_EQ(InFakeCuda<int(void*)>("cuCtxPushCurrent_v2")(context), 0);
  ASSERT_EQ(InFakeCuda<int(unsigned long long*, size_t)>("cuMemAlloc_v2")(&tensor, 100), 0);
  void* const at = reinterpret_cast<void*>(tensor);
  {
    const Lent lent;
    const auto gpu = Open(1), other = Open(0);
    EXPECT_TRUE(gpu->Owns(at));
    const auto memory = gpu->Import(lent.fd(), kBlock).value();
    lent.Write(0, "weights");
    ASSERT_TRUE(gpu->Copy(at, memory->data(), 7).ok());
    ASSERT_TRUE(gpu->Copy(memory->data() + 50, at, 7).ok());
    EXPECT_EQ(lent.Read(50, 7), "weights");
    EXPECT_FALSE(other->Copy(at, at, 7).ok());
    EXPECT_FALSE(gpu->Import(-1, kBlock).ok());
    EXPECT_THAT(cuda_.current(), ElementsAre(1));
  }
  EXPECT_THAT(cuda_.current(), ElementsAre(1));
  EXPECT_EQ(cuda_.live(), (FakeCuda::Live{.contexts = 1, .reservations = 1, .mappings = 1}));
  EXPECT_EQ(InFakeCuda<int(unsigned long long)>("cuMemFree_v2")(tensor), 0);
  EXPECT_EQ(InFakeCuda<int(void**)>("cuCtxPopCurrent_v2")(&context), 0);
  EXPECT_EQ(InFakeCuda<int(int)>("cuDevicePrimaryCtxRelease_v2")(1), 0);
}

TEST_F(GpuTest, ACopyDoesNotWaitForAnotherThreads) {
  const Lent lent;
  const auto gpu = Open();
  const auto memory = gpu->Import(lent.fd(), kBlock).value();
  const std::string gradient(100, 'g');
  std::string weight(100, '?');
  absl::Notification pulled;
  cuda_.HoldCopies(memory->data());
  std::thread pusher([&] { EXPECT_TRUE(gpu->Copy(memory->data(), gradient.data(), gradient.size()).ok()); });
  EXPECT_TRUE(cuda_.AwaitHeld());
  std::thread reader([&] {
    EXPECT_TRUE(gpu->Copy(weight.data(), memory->data() + 1000, weight.size()).ok());
    pulled.Notify();
  });
  EXPECT_TRUE(pulled.WaitForNotificationWithTimeout(absl::Seconds(60)));
  EXPECT_EQ(weight, std::string(100, '\0'));
  EXPECT_EQ(lent.Read(0, 100), std::string(100, '\0'));
  cuda_.HoldCopies(nullptr);
  pusher.join();
  reader.join();
  EXPECT_EQ(lent.Read(0, 100), gradient);
}

TEST_F(GpuTest, ManyThreadsCopyAtOnceEachItsOwn) {
  constexpr int kThreads = 4, kCopies = 200;
  const Lent lent;
  const auto gpu = Open();
  const auto memory = gpu->Import(lent.fd(), kBlock).value();
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([&, t] {
      std::byte* const own = memory->data() + 10000 * t;
      for (int i = 0; i < kCopies; ++i) {
        const std::string written(10000, static_cast<char>(31 * t + i));
        std::string read(written.size(), '?');
        EXPECT_TRUE(gpu->Copy(own, written.data(), written.size()).ok());
        EXPECT_TRUE(gpu->Copy(read.data(), own, read.size()).ok());
        EXPECT_EQ(read, written);
      }
      EXPECT_THAT(cuda_.current(), IsEmpty());
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_LE(cuda_.live().streams, kThreads);
}

TEST_F(GpuTest, EachCallThatFailsIsToldOfAndLeavesNothing) {
  int64_t used = 0, failed = 0;
  ASSERT_TRUE(Use(&used).ok());
  cuda_.FailCall(0, 0);
  const int64_t before = cuda_.calls();
  ASSERT_TRUE(Use(&used).ok());
  const int64_t all = cuda_.calls() - before;  // with what ends it
  EXPECT_GT(all, used);
  for (int64_t n = 1; n <= all; ++n) {
    cuda_.FailCall(n, kUnknown);
    const absl::Status status = Use(&used);
    cuda_.FailCall(0, 0);
    EXPECT_EQ(status.ok(), n > used) << n << ": " << status;
    EXPECT_FALSE(absl::IsDataLoss(status)) << n << ": " << status;
    EXPECT_EQ(cuda_.live(), FakeCuda::Live()) << n << ": " << status;
    EXPECT_THAT(cuda_.current(), IsEmpty()) << n << ": " << status;
    failed += status.ok() ? 0 : 1;
  }
  EXPECT_EQ(failed, used);
}

TEST_F(GpuTest, SaysWhatTheDriverSaid) {
  const Lent lent;
  const auto gpu = Open(1);
  const auto memory = gpu->Import(lent.fd(), kBlock).value();
  char byte = '?';
  const absl::Status past = gpu->Copy(&byte, memory->data() + kBlock, 1);
  EXPECT_TRUE(absl::IsInternal(past));
  EXPECT_EQ(past.message(), "cuMemcpyAsync on cuda:1: invalid argument (error 1)");
  EXPECT_FALSE(gpu->Copy(memory->data() + kBlock - 1, "ab", 2).ok());
  cuda_.FailCall(3, 12345);  // of push, a copy, and the wait
  EXPECT_EQ(gpu->Copy(&byte, memory->data(), 1).message(), "cuStreamSynchronize on cuda:1: unknown (error 12345)");
  cuda_.FailCall(3, 2);
  EXPECT_TRUE(absl::IsResourceExhausted(gpu->Import(lent.fd(), kBlock).status()));
  cuda_.FailCall(2, kUnknown);
  EXPECT_TRUE(gpu->Owns(&byte));  // who knows
}

TEST_F(GpuTest, NoDriverAnOldOneAndNoSuchGpu) {
  const absl::Status none = Gpu::Open(0, "libcuda-of-nobody.so.1").status();
  EXPECT_TRUE(absl::IsNotFound(none));
  EXPECT_THAT(none.message(), HasSubstr("there is no CUDA driver, libcuda-of-nobody.so.1"));
  const absl::Status old = Gpu::Open(0, FAKE_OLD_CUDA).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(old));
  EXPECT_THAT(old.message(), HasSubstr("has no cuMemAddressReserve: install one of CUDA 11.0"));
  for (const int ordinal : {-1, 3}) {
    const absl::Status absent = Gpu::Open(ordinal, FAKE_CUDA).status();
    EXPECT_TRUE(absl::IsNotFound(absent)) << absent;
    EXPECT_THAT(absent.message(),
                HasSubstr(absl::StrCat("cuDeviceGet on cuda:", ordinal, ": invalid device ordinal (error 101)")));
  }
}

TEST_F(GpuTest, IsFoundByItsNameOnceItIsOpened) { EXPECT_TRUE(Gpu::Open(0, "libcuda.so.1").ok()); }

TEST_F(GpuTest, RefusesWhatIsNoMemoryOfThatSize) {
  const Lent lent;
  const auto gpu = Open();
  int ends[2] = {};
  ASSERT_EQ(pipe(ends), 0);
  for (const int fd : {-1, 1 << 20, ends[0]}) {
    const absl::Status refused = gpu->Import(fd, kBlock).status();
    EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
    EXPECT_THAT(refused.message(), HasSubstr("cuMemImportFromShareableHandle on cuda:0: invalid argument (error 1)"));
  }
  for (const uint64_t bytes : {uint64_t{0}, kBlock - 1, 2 * kBlock, ~uint64_t{0}}) {
    EXPECT_TRUE(absl::IsFailedPrecondition(gpu->Import(lent.fd(), bytes).status())) << bytes;
  }
  EXPECT_EQ(write(ends[1], "x", 1), 1);  // open still
  close(ends[0]);
  close(ends[1]);
}

TEST_F(GpuTest, AGpuThatCannotReachTheDaemonsSaysSo) {
  const Lent lent;
  const absl::Status apart = Open(2)->Import(lent.fd(), kBlock).status();
  EXPECT_TRUE(absl::IsFailedPrecondition(apart)) << apart;
  EXPECT_THAT(apart.message(),
              HasSubstr("cuda:2 cannot reach the daemon's GPU memory: cuMemSetAccess on cuda:2: invalid "
                        "device ordinal (error 101)"));
}

TEST_F(GpuTest, TheMemoryKeepsTheGpu) {
  const Lent lent;
  auto gpu = Open();
  auto memory = gpu->Import(lent.fd(), kBlock).value();
  gpu.reset();
  EXPECT_EQ(cuda_.live(), (FakeCuda::Live{.contexts = 1, .reservations = 1, .mappings = 1}));
}

TEST_F(GpuTest, AForkIsRefusedAndItsEndCallsNoDriver) {
  const Lent lent;
  auto gpu = Open();
  auto memory = gpu->Import(lent.fd(), kBlock).value();
  ASSERT_TRUE(gpu->Copy(memory->data(), "a", 1).ok());
  EXPECT_TRUE(HoldsInFork([&] {
    const auto is_refused = [](const absl::Status& status) {
      return absl::IsFailedPrecondition(status) && status.message().find("a fork") != std::string::npos;
    };
    const int64_t calls = cuda_.calls();
    char byte = '?';
    const bool refused = is_refused(gpu->Copy(&byte, memory->data(), 1)) && is_refused(gpu->Copy(&byte, &byte, 0)) &&
                         is_refused(gpu->Import(lent.fd(), kBlock).status()) && gpu->Owns(&byte) &&
                         is_refused(Gpu::Open(0, FAKE_CUDA).status());
    memory.reset();
    gpu.reset();
    return refused && cuda_.calls() == calls;
  }));
  char byte = '?';
  EXPECT_TRUE(gpu->Copy(&byte, memory->data(), 1).ok());
  EXPECT_EQ(byte, 'a');
}

TEST_F(GpuTest, AForkOfAProcessInWhichOthersUsedCudaIsRefused) {
  ASSERT_EQ(InFakeCuda<int(unsigned)>("cuInit")(0), 0);
  EXPECT_TRUE(HoldsInFork([] { return absl::IsFailedPrecondition(Gpu::Open(0, FAKE_CUDA).status()); }));
}

TEST_F(GpuTest, MayEndAfterTheDriver) {
  const Lent lent;
  auto gpu = Open();
  auto memory = gpu->Import(lent.fd(), kBlock).value();
  ASSERT_TRUE(gpu->Copy(memory->data(), "a", 1).ok());
  cuda_.ShutDown();
  EXPECT_FALSE(gpu->Copy(memory->data(), "a", 1).ok());
  EXPECT_TRUE(gpu->Owns(memory->data()));
  const int64_t calls = cuda_.calls();
  memory.reset();
  gpu.reset();
  EXPECT_LE(cuda_.calls() - calls, 3);  // it asks once for each, and gives the context back
  cuda_.Reset();                        // nothing was ended
}

// Ends the process when the memory is still there, to be destroyed after the driver has shut down.
void ExitWithMemory() {
  static std::unique_ptr<Gpu::Memory> memory;
  const Lent lent;
  memory = Gpu::Open(0, FAKE_CUDA).value()->Import(lent.fd(), kBlock).value();
  std::exit(0);
}

TEST_F(GpuTest, MayEndWithTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");  // in a process anew
  EXPECT_EXIT(ExitWithMemory(), ::testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace ballast
