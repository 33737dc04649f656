// Times updates on a GPU against a device-to-device copy of the same bytes.
//
//   gpu_bench [--rounds N] [--seconds S] [--smallest BITS] [--largest BITS] [--llama-layers N] [--json FILE]
//
//   --rounds N         of each case (default 15)
//   --seconds S        no case is begun after that many (default 60); those left out are listed
//   --smallest BITS    the smallest tensor has 2^BITS elements (default 20)
//   --largest BITS     the largest (default 30)
//   --llama-layers N   of the Llama-3.1-8B shapes, for GPUs with less memory (default 32: all; 57 GB with the copy)
//   --json FILE        one JSON object a line; without it, to standard output
//
// A case is a kernel and the tensors it updates. In every round the copy and each variant (rounding, statistics) have
// their turn, in alternating order, so that whatever else happens strikes all; the share of the copy is taken round by
// round. Single tensors of less than 2^26 elements are launched one after the other over as many as make 2^26, so that
// no cache holds them; the tensors of a model are one batch, one launch.
//
// Bytes of a parameter: every plane read and written once, the gradient (bf16) read once; the first pass of a rule of
// two is not counted, and so lowers its share. The copy reads half of these bytes and writes half. Rules over matrices are
// timed by themselves: gpu_matrices.h.
#include <algorithm>
#include <array>
#include <chrono>
#include <cmath>
#include <fstream>
#include <functional>
#include <iostream>

#include "kernels/registry.h"
#include "tests/bench/gpu_matrices.h"
#include "tests/bench/gpu_tensors.h"
#include "tests/bench/gpu_timer.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kRound = uint64_t{1} << 26;  // elements that a round works on at least
constexpr uint64_t kCopyMost = uint64_t{4} << 30;

struct Options {
  int rounds = 15;
  double seconds = 60;
  int smallest = 20, largest = 30;
  int llama_layers = 32;
  std::string json;
};

struct Triple {
  const char *rule, *master, *state;
  std::vector<bool> stochastic;
};
const std::vector<Triple> kTriples = {
    {"adamw", "split24", "companded8", {false, true}},
    {"stable_adamw", "split24", "companded8", {true}},
    {"lion", "split24", "companded8", {true}},
    {"sgd", "split24", "companded8", {true}},
    {"collage_plus", "mcf", "mcf", {false}},
    {"adamw", "mcf8", "companded8", {true}},
    {"adamw", "fp32", "fp32", {false}},
};

std::vector<Work> AllWork(const Options& options) {
  std::vector<Work> all;
  for (int bits = options.smallest; bits <= options.largest; bits += 2) {
    const uint64_t n = uint64_t{1} << bits;
    all.push_back({"2^" + std::to_string(bits), std::vector<uint64_t>(std::max<uint64_t>(1, kRound / n), n), false});
  }
  all.push_back({"ViT-S/16", VisionShapes(384, 12), true});
  all.push_back({"ViT-V/16", VisionShapes(1024, 24), true});
  all.push_back(
      {"Llama-3.1-8B, " + std::to_string(options.llama_layers) + " layers", LlamaShapes(options.llama_layers), true});
  return all;
}

// Copies as many bytes at a time as a launch has, or as its buffers hold.
class Copier {
 public:
  Copier(uint64_t bytes, uint64_t pieces, const Stream& stream)
      : each_(bytes / 2 / pieces), pieces_(pieces), stream_(stream) {
    from_ = DeviceArray(std::min(bytes / 2, kCopyMost));
    to_ = DeviceArray(from_.bytes());
    FillWithPattern(from_, 1, stream);
  }
  static uint64_t BytesNeeded(uint64_t bytes) { return 2 * std::min(bytes / 2, kCopyMost); }
  void Launch() const {
    uint64_t at = 0;
    for (uint64_t piece = 0; piece < pieces_; ++piece) {
      for (uint64_t left = each_; left > 0;) {
        if (at == from_.bytes()) at = 0;
        const uint64_t now = std::min(left, from_.bytes() - at);
        Check(cudaMemcpyAsync(to_.data() + at, from_.data() + at, now, cudaMemcpyDeviceToDevice, stream_.get()),
              "copy");
        at += now, left -= now;
      }
    }
  }

 private:
  const uint64_t each_, pieces_;
  const Stream& stream_;
  DeviceArray from_, to_;
};

// Time between two events of a stream.
struct Variant {
  std::string rounding, statistics;
  std::function<void()> launch;
  std::vector<double> seconds;
};

class Bench {
 public:
  Bench(const Options& options, std::ostream& out)
      : options_(options), out_(out), started_(std::chrono::steady_clock::now()) {}

  // Returns whether no block of any case was rejected.
  bool All() {
    BenchMatrices(options_.rounds, stream_, out_);
    for (const Work& work : AllWork(options_)) {
      for (const Triple& triple : kTriples) Case(triple, work);
    }
    return sound_;
  }

 private:
  static std::string Title(const Triple& triple, const Work& work) {
    return std::string("\"rule\": \"") + triple.rule + "\", \"formats\": \"" + triple.master + "+" + triple.state +
           "\", \"tensors\": \"" + work.name + "\"";
  }
  void Skip(const Triple& triple, const Work& work, const std::string& why) {
    out_ << "{" << Title(triple, work) << ", \"skipped\": \"" << why << "\"}" << std::endl;
    std::cerr << "!! skipped: " << triple.rule << " " << work.name << ": " << why << std::endl;
  }

  void Case(const Triple& triple, const Work& work) {
    const std::chrono::duration<double> spent = std::chrono::steady_clock::now() - started_;
    if (spent.count() > options_.seconds) return Skip(triple, work, "no time left");
    const Kernel& kernel = *FindKernel(triple.rule, triple.master, triple.state);
    const uint64_t needed = Tensors::BytesNeeded(kernel, work), copied = 2 * needed;
    size_t free = 0, total = 0;
    Check(cudaMemGetInfo(&free, &total), "cudaMemGetInfo");
    if (needed + Copier::BytesNeeded(copied) + (uint64_t{1} << 30) > free) {
      return Skip(triple, work, "the GPU has " + std::to_string(free >> 20) + " MiB free");
    }
    const Tensors tensors(kernel, work, stream_);
    const double bytes = static_cast<double>(tensors.elements()) * tensors.BytesEach();
    const Copier copier(static_cast<uint64_t>(bytes), work.together ? 1 : work.sizes.size(), stream_);
    std::vector<DeviceArray> batches;
    std::vector<Variant> variants = {{"", "", [&copier] { copier.Launch(); }, {}}};
    AddVariants(triple, tensors, &batches, &variants);
    Measure(&variants);
    Report(triple, work, tensors, variants);
    if (tensors.Rejected() == 0) return;
    sound_ = false;
    Skip(triple, work, "a block was rejected: these figures mean nothing");
  }

  // Each rounding and level of statistics; kCore also by the kernel for updates of every kind.
  static void AddVariants(const Triple& triple, const Tensors& tensors, std::vector<DeviceArray>* batches,
                          std::vector<Variant>* variants) {
    struct Level {
      const char* name;
      StatisticsLevel level;
      bool ordinary;
    };
    constexpr Level kLevels[] = {{"off", StatisticsLevel::kOff, false},
                                 {"core", StatisticsLevel::kCore, true},
                                 {"core, not said to be ordinary", StatisticsLevel::kCore, false},
                                 {"full", StatisticsLevel::kFull, false}};
    batches->reserve(triple.stochastic.size() * std::size(kLevels));  // the variants point at them
    for (const bool stochastic : triple.stochastic) {
      for (const Level& level : kLevels) {
        batches->push_back(tensors.Batch({stochastic, level.level}));
        const DeviceArray* batch = &batches->back();
        variants->push_back({stochastic ? "stochastic" : "nearest",
                             level.name,
                             [&tensors, batch, ordinary = level.ordinary] { tensors.Launch(*batch, ordinary); },
                             {}});
      }
    }
  }

  // Round 0 and 1 warm up: they load code, and give the states values.
  void Measure(std::vector<Variant>* variants) {
    for (int round = 0; round < options_.rounds + 2; ++round) {
      for (size_t i = 0; i < variants->size(); ++i) {
        Variant& v = (*variants)[round % 2 == 0 ? i : variants->size() - 1 - i];
        const double seconds = timer_.Seconds(v.launch, stream_);
        if (round >= 2) v.seconds.push_back(seconds);
      }
    }
  }

  void Report(const Triple& triple, const Work& work, const Tensors& tensors, const std::vector<Variant>& variants) {
    const std::vector<double>& copy = variants[0].seconds;
    const auto elements = static_cast<double>(tensors.elements());
    std::vector<double> copied;
    for (const double s : copy) copied.push_back(elements * tensors.BytesEach() / s / 1e9);
    for (size_t i = 1; i < variants.size(); ++i) {
      std::vector<double> rates, shares;
      for (size_t r = 0; r < copy.size(); ++r) {
        rates.push_back(elements / variants[i].seconds[r] / 1e9);
        shares.push_back(copy[r] / variants[i].seconds[r]);
      }
      out_ << "{" << Title(triple, work) << ", \"count\": " << work.sizes.size()
           << ", \"elements\": " << (work.together ? tensors.elements() : work.sizes[0]) << ", \"rounding\": \""
           << variants[i].rounding << "\", \"statistics\": \"" << variants[i].statistics
           << "\", \"bytes_per_parameter\": " << tensors.BytesEach() << ", \"gparams_per_second\": " << Quartiles(rates)
           << ", \"share_of_copy\": " << Quartiles(shares) << ", \"copy_gb_per_second\": " << Quartiles(copied)
           << ", \"rounds\": " << copy.size() << "}" << std::endl;
    }
  }

  const Options options_;
  std::ostream& out_;
  const std::chrono::steady_clock::time_point started_;
  const Stream stream_;
  Timer timer_;
  bool sound_ = true;
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
    } else if (flag == "--smallest" && number >= 20 && number <= 33) {
      options->smallest = static_cast<int>(number);
    } else if (flag == "--largest" && number >= 20 && number <= 33) {
      options->largest = static_cast<int>(number);
    } else if (flag == "--llama-layers" && number >= 1 && number <= 32) {
      options->llama_layers = static_cast<int>(number);
    } else {
      return false;
    }
  }
  return argc % 2 == 1;
}

int Main(int argc, char** argv) {
  Options options;
  if (!ReadOptions(argc, argv, &options)) {
    std::cerr
        << "gpu_bench: wanted [--rounds N] [--seconds S] [--smallest 20..33] [--largest 20..33] [--llama-layers 1..32] "
           "[--json FILE]\n";
    return 2;
  }
  if (const std::string why = WhyNoGpu(); !why.empty()) {
    std::cerr << "!! NO GPU (" << why << "): NOTHING WAS MEASURED\n";
    return kNoGpuExitCode;
  }
  std::ofstream file;
  if (!options.json.empty()) file.open(options.json);
  try {
    return Bench(options, options.json.empty() ? std::cout : file).All() ? 0 : 1;
  } catch (const CudaFailure& error) {
    std::cerr << "gpu_bench: " << error.what() << "\n";
    return 1;
  }
}

}  // namespace
}  // namespace ballast::kernels

int main(int argc, char** argv) { return ballast::kernels::Main(argc, argv); }
