// A GPU's own memory and streams, on a driver that the tests play (fake_cuda.h).
#include <dlfcn.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <thread>

#include "proto/gpu/gpu.h"

#include "tests/client/fake_cuda.h"
#include "tests/client/in_fork.h"

namespace ballast {
namespace {

using ::testing::IsEmpty;

constexpr int kOutOfMemory = 2, kAnyError = 999;

template <typename Function>
Function* DriverFunction(const char* name) {
  static void* const library = dlopen(FAKE_CUDA, RTLD_NOW | RTLD_LOCAL);
  return reinterpret_cast<Function*>(dlsym(library, name));
}

class GpuStreamTest : public ::testing::Test {
 protected:
  GpuStreamTest() { cuda_.Reset(); }
  ~GpuStreamTest() override { ExpectNothingIsLeft(0); }

  void ExpectNothingIsLeft(int64_t call) {
    EXPECT_EQ(cuda_.live(), FakeCuda::Live()) << call;
    EXPECT_THAT(cuda_.current(), IsEmpty()) << call;
  }
  static std::shared_ptr<Gpu> OpenGpu() { return Gpu::Open(1, FAKE_CUDA).value(); }
  // Gives a stream a copy.
  static void Give(const Gpu& gpu, const Gpu::Stream& stream, void* to, const void* from, size_t bytes) {
    const auto copy = [&] {
      const auto address = [](const void* at) { return reinterpret_cast<unsigned long long>(at); };
      const auto give = DriverFunction<int(unsigned long long, unsigned long long, size_t, void*)>("cuMemcpyAsync");
      EXPECT_EQ(give(address(to), address(from), bytes, stream.handle()), 0);
      return absl::OkStatus();
    };
    EXPECT_TRUE(gpu.InContext(copy).ok());
  }
  // A use of memory and a stream from its beginning to before its end; `calls`: how many calls it took.
  absl::Status Use(int64_t* calls) {
    const int64_t before = cuda_.calls();
    auto gpu = Gpu::Open(0, FAKE_CUDA);
    if (!gpu.ok()) return gpu.status();
    const auto memory = (*gpu)->Allocate(100);
    if (!memory.ok()) return memory.status();
    const auto stream = (*gpu)->NewStream();
    if (!stream.ok()) return stream.status();
    const auto done = (*stream)->Done();
    if (!done.ok()) return done.status();
    *calls = cuda_.calls() - before;
    return *done ? absl::OkStatus() : absl::UnknownError("nothing is not done");
  }

  FakeCuda& cuda_ = *DriverFunction<FakeCuda*()>("FakeCudaOfTests")();
};

TEST_F(GpuStreamTest, AllocatesMemoryOfTheGpusUntilItsEnd) {
  auto gpu = OpenGpu();
  auto memory = gpu->Allocate(1001).value();
  const auto other = gpu->Allocate(1).value();
  EXPECT_EQ(memory->bytes(), 1001);
  EXPECT_TRUE(gpu->Owns(memory->data() + 1000));
  EXPECT_EQ(cuda_.live(), (FakeCuda::Live{.contexts = 1, .reservations = 2, .mappings = 2}));
  ASSERT_TRUE(gpu->Copy(memory->data() + 1000, "z", 1).ok());
  ASSERT_TRUE(gpu->Copy(other->data(), memory->data() + 1000, 1).ok());
  const std::byte* const was = memory->data();
  memory.reset();
  EXPECT_FALSE(gpu->Owns(was));
  char read = '?';
  ASSERT_TRUE(gpu->Copy(&read, other->data(), 1).ok());
  EXPECT_EQ(read, 'z');
  gpu.reset();  // the memory keeps it
  EXPECT_EQ(cuda_.live(), (FakeCuda::Live{.contexts = 1, .streams = 1, .reservations = 1, .mappings = 1}));
}

TEST_F(GpuStreamTest, SaysThatThereIsNoMemory) {
  const auto gpu = OpenGpu();
  cuda_.FailCall(2, kOutOfMemory);  // of push and this
  const absl::Status none = gpu->Allocate(1).status();
  EXPECT_TRUE(absl::IsResourceExhausted(none)) << none;
  EXPECT_EQ(none.message(), "cuMemAlloc_v2 on cuda:1: out of memory (error 2)");
  EXPECT_TRUE(absl::IsInternal(gpu->Allocate(0).status()));
  EXPECT_EQ(cuda_.live(), (FakeCuda::Live{.contexts = 1}));
}

TEST_F(GpuStreamTest, IsDoneWhenAllThatItWasGivenIs) {
  const auto gpu = OpenGpu();
  const auto memory = gpu->Allocate(10).value();
  const auto stream = gpu->NewStream().value();
  std::string read(2, '?');
  EXPECT_TRUE(stream->Done().value());
  Give(*gpu, *stream, memory->data(), "ab", 2);
  Give(*gpu, *stream, read.data(), memory->data(), 2);
  EXPECT_FALSE(stream->Done().value());
  EXPECT_EQ(read, "??");
  EXPECT_FALSE(stream->Done().value());
  EXPECT_TRUE(stream->Done().value());
  EXPECT_EQ(read, "ab");
}

TEST_F(GpuStreamTest, AHeldCopyIsNotDone) {
  const auto gpu = OpenGpu();
  const auto memory = gpu->Allocate(10).value();
  const auto stream = gpu->NewStream().value();
  cuda_.HoldCopies(memory->data());
  Give(*gpu, *stream, memory->data(), "a", 1);
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(stream->Done().value());
  EXPECT_EQ(cuda_.live().copies, 1);
  cuda_.HoldCopies(nullptr);
  EXPECT_FALSE(stream->Done().value());
  EXPECT_TRUE(stream->Done().value());
}

TEST_F(GpuStreamTest, TheWorkOfOthersHasItsTurn) {
  const auto gpu = OpenGpu();
  const auto memory = gpu->Allocate(10).value();
  const auto stream = gpu->NewStream().value(), other = gpu->NewStream().value();
  std::string read(1, '?');
  Give(*gpu, *stream, memory->data(), "a", 1);
  const int64_t work = cuda_.BeginWork(stream->handle(), 1);
  Give(*gpu, *stream, read.data(), memory->data(), 1);
  EXPECT_GT(work, 0);
  EXPECT_EQ(cuda_.BeginWork(stream->handle(), 0), 0);
  EXPECT_TRUE(other->Done().value());
  bool came = false;
  std::thread worker([&] { came = cuda_.AwaitTurn(work); });
  EXPECT_FALSE(stream->Done().value());
  worker.join();
  EXPECT_TRUE(came);
  EXPECT_EQ(*cuda_.Resolve(memory->data(), 1, 1), std::byte{'a'});
  for (int i = 0; i < 3; ++i) EXPECT_FALSE(stream->Done().value());
  EXPECT_EQ(read, "?");
  cuda_.EndWork(work);
  EXPECT_FALSE(cuda_.AwaitTurn(work));
  EXPECT_FALSE(stream->Done().value());
  EXPECT_EQ(read, "a");
  EXPECT_TRUE(stream->Done().value());
}

TEST_F(GpuStreamTest, ItsEndAndThatOfMemoryWaitForWhatItWasGiven) {
  const auto gpu = OpenGpu();
  auto memory = gpu->Allocate(10).value();
  auto stream = gpu->NewStream().value(), other = gpu->NewStream().value();
  std::string read(1, '?');
  Give(*gpu, *stream, memory->data(), "a", 1);
  Give(*gpu, *other, read.data(), memory->data(), 1);
  const int64_t work = cuda_.BeginWork(stream->handle(), 1);
  std::thread worker([&] {
    EXPECT_TRUE(cuda_.AwaitTurn(work));
    cuda_.EndWork(work);
  });
  stream.reset();
  EXPECT_EQ(cuda_.live().works, 0);
  worker.join();
  memory.reset();
  EXPECT_EQ(read, "a");
}

TEST_F(GpuStreamTest, EachCallThatFailsIsToldOf) {
  int64_t used = 0;
  const int64_t before = cuda_.calls();
  ASSERT_TRUE(Use(&used).ok());
  const int64_t all = cuda_.calls() - before;  // with what ends it
  EXPECT_GT(all, used);
  for (int64_t n = 1; n <= all; ++n) {
    cuda_.FailCall(n, kAnyError);
    const absl::Status status = Use(&used);
    cuda_.FailCall(0, 0);
    EXPECT_EQ(status.ok(), n > used) << n << ": " << status;
    ExpectNothingIsLeft(n);
  }
}

TEST_F(GpuStreamTest, InAForkAllIsRefusedAndTheirEndsCallNoDriver) {
  auto gpu = OpenGpu();
  auto memory = gpu->Allocate(10).value();
  auto stream = gpu->NewStream().value();
  EXPECT_TRUE(HoldsInFork([&] {
    const int64_t calls = cuda_.calls();
    const bool refused = absl::IsFailedPrecondition(stream->Done().status()) &&
                         absl::IsFailedPrecondition(gpu->NewStream().status()) &&
                         absl::IsFailedPrecondition(gpu->Allocate(10).status());
    stream.reset();
    memory.reset();
    gpu.reset();
    return refused && cuda_.calls() == calls;
  }));
  EXPECT_TRUE(stream->Done().value());
}

TEST_F(GpuStreamTest, MayEndAfterTheDriverHasShutDown) {
  auto gpu = OpenGpu();
  auto memory = gpu->Allocate(10).value();
  auto stream = gpu->NewStream().value();
  cuda_.ShutDown();
  EXPECT_FALSE(stream->Done().ok());
  EXPECT_FALSE(gpu->NewStream().ok());
  EXPECT_FALSE(gpu->Allocate(10).ok());
  const int64_t calls = cuda_.calls();
  stream.reset();
  memory.reset();
  gpu.reset();
  EXPECT_LE(cuda_.calls() - calls, 4);  // it asks once for each, and gives the context back
  cuda_.Reset();                        // nothing was ended
}

}  // namespace
}  // namespace ballast
