// Checks and times a GPU through the daemon's device layer, GpuDevice over the real driver, without a daemon.
//
//   gpu_device_bench [--rounds N] [--seconds S] [--shrink BITS] [--json FILE]
//
//   --rounds N      of each figure (default 7)
//   --seconds S     nothing is begun after that many (default 60); what is left out is listed
//   --shrink BITS   what is timed is 2^BITS times smaller, to try the program (default 0)
//   --json FILE     one JSON object a line; without it, to standard output
//
// Its parts, in this order:
//   bits     every kernel trains the model of device_model.h on the CPU and on the GPU: weights in five formats and all
//            statistics must be equal
//   copies   pinned memory to the GPU, back, and both at once, by the driver's own streams
//   queue    AdamW of the default recipe, gradients in bf16 from pinned memory: many small tensors, as many parameters in
//            few tensors, and a big model; each without and with its weights served in bf16, to ordinary memory and in
//            chunks of a run's default size. Its share of what the copies allow: 2 bytes a parameter in, and 2 out where
//            they are served.
//   stalls   the longest of some steps of few tensors, alone, and while memory of 1 GiB on the GPU and of the host is taken and
//            given back in turns, as when another run is made and deleted
//
// Exit codes: 0, 1 bits differ or the GPU failed, 2 a wrong flag, 77 there is no GPU.
#include <algorithm>
#include <array>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <exception>
#include <fstream>
#include <iostream>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "absl/synchronization/mutex.h"

#include "server/base/clock.h"
#include "server/device/cpu_device.h"
#include "server/device/gpu_device.h"
#include "server/device/gpu_discovery.h"
#include "tests/bench/gpu_device_tensors.h"
#include "tests/server/device/device_model.h"

namespace ballast::bench {
namespace {

constexpr int kNoGpuExitCode = 77;
constexpr double kGiga = 1e9;
constexpr int kStepsOfStalls = 200;

struct Options {
  int rounds = 7;
  double seconds = 60;
  int shrink = 0;
  std::string json;
};

std::vector<Shape> AllShapes(int shrink) {
  const uint64_t few = std::max<uint64_t>(20000 >> shrink, 1);
  return {{"many small tensors", few, 1000},
          {"as many parameters in few", 10, few * 100},
          {"a big model", 64, std::max<uint64_t>((16 << 20) >> shrink, 1000)}};
}

// The quartiles, as a JSON list.
std::string Quartiles(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  const auto at = [&](double share) {
    return values[static_cast<size_t>(std::lround(share * static_cast<double>(values.size() - 1)))];
  };
  return absl::StrFormat("[%.6g, %.6g, %.6g]", at(0.25), at(0.5), at(0.75));
}
double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// As the inside of a JSON string.
std::string Plain(const std::string& words) {
  return absl::StrReplaceAll(words, {{"\"", "'"}, {"\\", "/"}, {"\n", " "}, {"\t", " "}});
}

// The GPU as a device, and why it failed, if it did.
class WatchedGpu {
 public:
  WatchedGpu() : device_(OpenGpu(0).value()) {
    device_.Watch([this](const absl::Status& why) {
      absl::MutexLock lock(&mu_);
      failure_ = std::string(why.message());
    });
  }
  ~WatchedGpu() { device_.Watch(nullptr); }
  GpuDevice* device() { return &device_; }
  std::string failure() {
    absl::MutexLock lock(&mu_);
    return failure_;
  }

 private:
  absl::Mutex mu_;
  std::string failure_ ABSL_GUARDED_BY(mu_);
  GpuDevice device_;
};

// Memory of a driver.
class DriverMemory {
 public:
  DriverMemory(GpuDriver* gpu, uint64_t bytes, GpuDriver::Memory memory)
      : gpu_(gpu), memory_(memory), data_(gpu->Allocate(bytes, memory).value()) {}
  DriverMemory(const DriverMemory&) = delete;
  ~DriverMemory() { gpu_->Free(data_, memory_); }
  std::byte* data() const { return data_; }

 private:
  GpuDriver* const gpu_;
  const GpuDriver::Memory memory_;
  std::byte* const data_;
};

class Bench {
 public:
  Bench(const Options& options, std::ostream& out) : options_(options), out_(out) {}

  // Returns whether the bits are the CPU's and nothing failed.
  bool All() {
    Bits();
    Copies();
    for (const Shape& shape : AllShapes(options_.shrink)) {
      const std::string why_not = WhyNot();
      why_not.empty() ? Queue(shape) : Skip(TitleOf(shape), why_not);
    }
    const std::string why_not = WhyNot();
    why_not.empty() ? Stalls() : Skip(kStalls, why_not);
    return sound_;
  }

 private:
  static std::string TitleOf(const Shape& shape) {
    return absl::StrCat("\"part\": \"queue\", \"what\": \"", shape.what, "\", \"tensors\": ", shape.tensors,
                        ", \"elements\": ", shape.elements);
  }
  // The first part leaves half of the time to the others.
  bool TimeIsLeft(double share = 1) const { return MonotonicSeconds() - began_s_ < share * options_.seconds; }
  // Why nothing more is begun, or nothing.
  std::string WhyNot() const { return failed_ ? "the GPU failed" : TimeIsLeft() ? "" : "no time left"; }
  void Print(const std::string& title, const std::string& figures) {
    out_ << "{" << title << ", " << figures << "}" << std::endl;
  }
  void Skip(const std::string& title, const std::string& why) {
    Print(title, absl::StrCat("\"skipped\": \"", Plain(why), "\""));
    std::cerr << "!! skipped: " << title << ": " << why << std::endl;
  }
  void Fail(const std::string& why) {
    sound_ = false;
    std::cerr << "!! FAILED: " << why << std::endl;
  }
  // Of the GPU itself, with which nothing more can be done then.
  bool Failed(const std::string& why) {
    if (why.empty() || std::exchange(failed_, true)) return failed_;
    Fail(why);
    return true;
  }

  void Bits() {
    CpuDevice cpu({.threads = 4});
    WatchedGpu gpu;
    size_t compared = 0, differ = 0, pieces = 0, statistics = 0;
    std::string first;
    for (const kernels::Kernel& kernel : kernels::Kernels()) {
      if (kernel.fit != nullptr) continue;  // its bits are a library's
      if (!TimeIsLeft(0.5) || Failed(gpu.failure())) break;
      const bool there = compared % 2 == 1;  // sums in the GPU's memory
      const testing::TrainOutcome wanted = testing::TrainOn(&cpu, kernel, &testing::Model::BroughtStep);
      const testing::TrainOutcome got =
          testing::TrainOn(gpu.device(), kernel, there ? &testing::Model::ThereStep : &testing::Model::BroughtStep);
      ++compared;
      pieces += wanted.served.size();
      statistics += wanted.statistics.size();
      const std::string other = testing::WhatDiffers(wanted, got);
      if (other.empty()) continue;
      if (++differ == 1) first = absl::StrCat(kernel.rule, " ", kernel.master, " ", kernel.state, ": ", other);
    }
    if (Failed(gpu.failure())) first = absl::StrCat(gpu.failure(), first.empty() ? "" : "; ", first);
    if (differ > 0) Fail(absl::StrCat(differ, " kernels give other bits than the CPU: ", first));
    Print("\"part\": \"bits\"", absl::StrCat("\"kernels\": ", compared, ", \"of\": ", kernels::Kernels().size(),
                                             ", \"differences\": ", differ, ", \"pieces\": ", pieces,
                                             ", \"statistics\": ", statistics, ", \"first\": \"", Plain(first), "\""));
  }

  // GB/s of copies in, out, and both at once.
  void Copies() {
    const std::string title = "\"part\": \"copies\"";
    if (const std::string why = WhyNot(); !why.empty()) return Skip(title, why);
    using Memory = GpuDriver::Memory;
    using Stream = GpuDriver::Stream;
    const uint64_t bytes = (uint64_t{1} << 30) >> options_.shrink;
    const std::unique_ptr<GpuDriver> gpu = OpenGpu(0).value();
    const DriverMemory from_host(gpu.get(), bytes, Memory::kPinned), to_gpu(gpu.get(), bytes, Memory::kDevice);
    const DriverMemory from_gpu(gpu.get(), bytes, Memory::kDevice), to_host(gpu.get(), bytes, Memory::kPinned);
    const GpuDriver::Event in_done = gpu->NewEvent().value(), out_done = gpu->NewEvent().value();
    const auto seconds = [&](bool in, bool out) {
      const double began_s = MonotonicSeconds();
      if (in) gpu->Copy(Stream::kIn, to_gpu.data(), from_host.data(), bytes);
      if (out) gpu->Copy(Stream::kOut, to_host.data(), from_gpu.data(), bytes);
      gpu->Record(in_done, Stream::kIn);
      gpu->Record(out_done, Stream::kOut);
      for (const GpuDriver::Event event : {in_done, out_done}) {
        Failed(std::string(gpu->Await(event).message()));
      }
      return MonotonicSeconds() - began_s;
    };
    std::vector<double> in, out, both;
    for (int round = 0; round <= options_.rounds; ++round) {
      const double rates[] = {static_cast<double>(bytes) / seconds(true, false) / kGiga,
                              static_cast<double>(bytes) / seconds(false, true) / kGiga,
                              2 * static_cast<double>(bytes) / seconds(true, true) / kGiga};
      if (round == 0) continue;  // warms up
      in.push_back(rates[0]), out.push_back(rates[1]), both.push_back(rates[2]);
    }
    if (failed_) return Skip(title, WhyNot());
    in_rate_ = Median(in), both_rate_ = Median(both);
    Print(title, absl::StrCat("\"bytes\": ", bytes, ", \"in_gb_per_second\": ", Quartiles(in),
                              ", \"out_gb_per_second\": ", Quartiles(out),
                              ", \"both_gb_per_second\": ", Quartiles(both), ", \"rounds\": ", in.size()));
  }

  void Queue(Shape shape) try {
    WatchedGpu gpu;
    // State, gradient and its copy, with room for the rest.
    while (shape.tensors > 1 && shape.tensors * shape.elements * 8 > gpu.device()->memory_bytes() / 10 * 8) {
      shape.tensors /= 2;
      std::cerr << "!! " << shape.what << ": " << shape.tensors << " tensors, for want of memory" << std::endl;
    }
    Tensors tensors(gpu.device(), shape);
    std::array<std::vector<double>, 2> seconds;  // without, with serving
    for (int round = 0; round <= options_.rounds && (round < 2 || TimeIsLeft()); ++round) {
      for (const bool serve : {false, true}) {
        const double s = tensors.Step(serve);
        if (round > 0) seconds[serve].push_back(s);  // the first warms up
      }
    }
    if (Failed(gpu.failure())) return Skip(TitleOf(shape), WhyNot());
    if (!tensors.sound()) Fail(absl::StrCat(shape.what, ": not all was done, or a block was rejected"));
    for (const bool served : {false, true}) Report(shape, served, seconds[served]);
  } catch (const absl::BadStatusOrAccess& error) {
    if (!absl::IsResourceExhausted(error.status())) Fail(error.what());
    Skip(TitleOf(shape), error.what());
  }

  static constexpr const char* kStalls = "\"part\": \"stalls\"";
  void Stalls() try {
    WatchedGpu gpu;
    Tensors tensors(gpu.device(), AllShapes(options_.shrink)[1]);
    tensors.Step(false);  // warms up
    std::vector<double> alone, beside, taking;
    for (int i = 0; i < kStepsOfStalls; ++i) alone.push_back(1e3 * tensors.Step(false));
    absl::Status taken;
    std::atomic<bool> ended = false;
    std::thread other([&] {
      taken = TakeAndGiveBack(gpu.device(), &taking);
      ended = true;
    });
    do {
      beside.push_back(1e3 * tensors.Step(false));
    } while (!ended);
    other.join();
    if (Failed(gpu.failure())) return Skip(kStalls, WhyNot());
    if (!taken.ok()) return Skip(kStalls, std::string(taken.message()));
    if (!tensors.sound()) Fail("stalls: not all was done, or a block was rejected");
    Print(kStalls, absl::StrCat("\"alone_ms\": ", Longest(alone), ", \"beside_ms\": ", Longest(beside),
                                ", \"taking_ms\": ", Longest(taking), ", \"steps\": ", beside.size()));
  } catch (const absl::BadStatusOrAccess& error) {
    if (!absl::IsResourceExhausted(error.status())) Fail(error.what());
    Skip(kStalls, error.what());
  }

  // Milliseconds of each time.
  absl::Status TakeAndGiveBack(Device* device, std::vector<double>* taking) const {
    for (const Place place : {Place::kDevice, Place::kHost}) {
      for (int i = 0; i < options_.rounds; ++i) {
        const double began_s = MonotonicSeconds();
        if (const auto memory = device->Allocate((uint64_t{1} << 30) >> options_.shrink, place); !memory.ok()) {
          return memory.status();
        }
        taking->push_back(1e3 * (MonotonicSeconds() - began_s));
      }
    }
    return absl::OkStatus();
  }
  // The median and the longest, as a JSON list.
  static std::string Longest(const std::vector<double>& values) {
    return absl::StrFormat("[%.6g, %.6g]", Median(values), *std::ranges::max_element(values));
  }

  void Report(const Shape& shape, bool served, const std::vector<double>& seconds) {
    const auto tensors = static_cast<double>(shape.tensors);
    const double giga = tensors * static_cast<double>(shape.elements) / kGiga;
    const double allowed_s = served ? 4 * giga / both_rate_ : 2 * giga / in_rate_;
    std::vector<double> each, rates, shares;
    for (const double s : seconds) {
      each.push_back(s / tensors * 1e6);
      rates.push_back(giga / s);
      shares.push_back(allowed_s / s);
    }
    Print(TitleOf(shape),
          absl::StrCat("\"served\": \"", served ? "bf16" : "no", "\", \"microseconds_per_tensor\": ", Quartiles(each),
                       ", \"gparams_per_second\": ", Quartiles(rates), in_rate_ > 0 ? ", \"share_of_copies\": " : "",
                       in_rate_ > 0 ? Quartiles(shares) : "", ", \"rounds\": ", seconds.size()));
  }

  const Options options_;
  std::ostream& out_;
  const double began_s_ = MonotonicSeconds();
  double in_rate_ = 0, both_rate_ = 0;  // GB/s
  bool sound_ = true, failed_ = false;
};

bool ReadOptions(int argc, char** argv, Options* options) {
  for (int i = 1; i + 1 < argc; i += 2) {
    const std::string flag = argv[i];
    const double number = std::atof(argv[i + 1]);
    if (flag == "--json") {
      options->json = argv[i + 1];
    } else if (flag == "--rounds" && number >= 1) {
      options->rounds = static_cast<int>(number);
    } else if (flag == "--seconds" && number > 0) {
      options->seconds = number;
    } else if (flag == "--shrink" && number >= 0 && number <= 20) {
      options->shrink = static_cast<int>(number);
    } else {
      return false;
    }
  }
  return argc % 2 == 1;
}

int Main(int argc, char** argv) {
  Options options;
  if (!ReadOptions(argc, argv, &options)) {
    std::cerr << "gpu_device_bench: wanted [--rounds N] [--seconds S] [--shrink 0..20] [--json FILE]\n";
    return 2;
  }
  if (const auto gpu = OpenGpu(0); absl::IsNotFound(gpu.status())) {
    std::cerr << "!! NO GPU (" << gpu.status().message() << "): NOTHING WAS CHECKED OR MEASURED\n";
    return kNoGpuExitCode;
  }
  std::ofstream file;
  if (!options.json.empty()) file.open(options.json);
  try {
    return Bench(options, options.json.empty() ? std::cout : file).All() ? 0 : 1;
  } catch (const std::exception& error) {
    std::cerr << "gpu_device_bench: " << error.what() << "\n";
    return 1;
  }
}

}  // namespace
}  // namespace ballast::bench

int main(int argc, char** argv) { return ballast::bench::Main(argc, argv); }
