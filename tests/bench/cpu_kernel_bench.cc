// Times one update of a tensor at a time, on request, so that cpu_kernels.py can take turns between this program's
// isas and other programs.
//
//   cpu_kernel_bench [--elements N] [--gradient bf16|fp32]
//
// Each line of standard input is answered by one line: a number of seconds, or "error: ..." (and exit code 1 at the
// end). The threads have equal shares of the tiles, and are started before the clock is.
//
//   update ISA RULE MASTER STATE nearest|stochastic off|core|full|dry THREADS   all passes of the rule; dry: core
//                                      statistics, and nothing is stored
//   curvature ISA RULE MASTER STATE THREADS   one probe, not the first, of the tensor as updates left it
//   mimic RULE MASTER STATE THREADS    the same reads and writes without the arithmetic: the honest bound
//   memcpy BYTES THREADS               reads BYTES and writes BYTES
//   isas                              the usable isas, the fastest last
//   bytes RULE MASTER STATE            moved a parameter: planes read and written once, the gradient read once
//
// Planes are made, filled and touched at their triple's first line; all isas and mimic share them.
#include <sys/mman.h>

#include <algorithm>
#include <barrier>
#include <chrono>
#include <cstring>
#include <iostream>
#include <map>
#include <memory>
#include <set>
#include <sstream>
#include <string>
#include <thread>
#include <vector>

#include "kernels/cpu/tables.h"
#include "kernels/registry.h"
#include "tests/bench/mimic.h"

namespace ballast::kernels {
namespace {

constexpr uint64_t kRow = 256;
constexpr int kMaxThreads = 256;
constexpr size_t kHugePage = size_t{2} << 20;

// What a person may have got wrong.
struct BadLine {
  std::string message;
};

// In huge pages where the system has them, as the CPU device's memory is (server/device/cpu_device.cc).
class Buffer {
 public:
  explicit Buffer(uint64_t bytes) : bytes_(new (std::align_val_t{kHugePage}) std::byte[bytes]) {
    madvise(bytes_.get(), bytes, MADV_HUGEPAGE);
    std::memset(bytes_.get(), 0, bytes);
  }
  std::byte* data() const { return bytes_.get(); }

 private:
  struct Free {
    void operator()(std::byte* p) const { ::operator delete[](p, std::align_val_t{kHugePage}); }
  };
  std::unique_ptr<std::byte[], Free> bytes_;
};

// About normal, with a deviation of `scale`: what matters is that no two blocks are alike.
std::vector<float> Values(uint64_t n, uint64_t seed, float scale) {
  std::vector<float> values(n);
  uint64_t word = seed;
  for (float& x : values) {
    word = word * 6364136223846793005u + 1442695040888963407u;
    int sum = 0;
    for (int shift = 32; shift < 64; shift += 8) sum += static_cast<int>(word >> shift & 0xff);
    x = scale * (static_cast<float>(sum) - 510.0f) / 148.0f;
  }
  return values;
}

// Seconds from the moment all threads are ready until the last has returned from work(its index).
template <class Work>
double Time(int threads, const Work& work) {
  std::barrier ready(threads);
  std::vector<std::thread> others;
  for (int i = 1; i < threads; ++i) {
    others.emplace_back([&ready, &work, i] {
      ready.arrive_and_wait();
      work(i);
    });
  }
  ready.arrive_and_wait();
  const auto started = std::chrono::steady_clock::now();
  work(0);
  for (std::thread& other : others) other.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

uint64_t Share(uint64_t count, int threads, int i) {
  return count * static_cast<uint64_t>(i) / static_cast<uint64_t>(threads);
}

struct Tensor {
  std::vector<Buffer> planes;
  uint64_t steps = 0;
};

struct Names {
  std::string rule, master, state;
};

class Bench {
 public:
  Bench(uint64_t elements, const std::string& gradient) : elements_(elements), format_(FindWireFormat(gradient)) {
    const WireFormat& format = WireFormats()[static_cast<size_t>(format_)];
    gradient_bytes_ = format.bytes;
    gradient_ = std::make_unique<Buffer>(PaddedElements(elements) * format.bytes);
    const Buffer wide(PaddedElements(elements) * 4);
    std::byte* planes[] = {wide.data()};
    FindMasterFormat("fp32")->load(planes, FindWireFormat("fp32"), Values(elements, 2, 1e-3f).data(), 0, elements);
    FindMasterFormat("fp32")->encode_weights(planes, format_, nullptr, 0, gradient_->data(), 0, elements);
  }

  std::string Answer(const std::string& line) {
    std::istringstream in(line);
    std::string command;
    in >> command;
    if (command == "update") return Number(UpdateLine(in));
    if (command == "curvature") return Number(CurvatureLine(in));
    if (command == "mimic") return Number(MimicLine(in));
    if (command == "memcpy") return Number(MemcpyLine(in));
    if (command == "isas") return Joined(IsaNames());
    if (command == "bytes") return Number(MovedBytes(KernelOf(*UsableIsas().front(), ReadNames(in))));
    throw BadLine{"unknown command '" + command + "': update, curvature, mimic, memcpy, isas, bytes"};
  }

 private:
  static std::string Number(double x) {
    std::ostringstream out;
    out.precision(9);
    out << x;
    return out.str();
  }
  template <class Names>
  static std::string Joined(const Names& names) {
    std::string all;
    for (const std::string& name : names) all.append(all.empty() ? "" : ", ").append(name);
    return all;
  }
  static std::vector<std::string> IsaNames() {
    std::vector<std::string> names;
    for (const IsaTables* isa : UsableIsas()) names.emplace_back(isa->name);
    return names;
  }

  // --- reading a line ---

  // The next word of the line, one of `valid`, as an index.
  static size_t OneOf(std::istream& in, const char* what, const std::vector<std::string>& valid) {
    std::string word;
    in >> word;
    const auto found = std::find(valid.begin(), valid.end(), word);
    if (found != valid.end()) return static_cast<size_t>(found - valid.begin());
    throw BadLine{std::string("unknown ") + what + " '" + word + "': " + Joined(valid)};
  }
  static const IsaTables& ReadIsa(std::istream& in) {
    return *UsableIsas()[OneOf(in, "isa (of those this processor can run)", IsaNames())];
  }
  static Names ReadNames(std::istream& in) {
    Names names;
    in >> names.rule >> names.master >> names.state;
    return names;
  }
  static int ReadThreads(std::istream& in) {
    int threads = 0;
    std::string more;
    if (!(in >> threads) || threads < 1 || threads > kMaxThreads) throw BadLine{"THREADS must be 1 to 256"};
    if (in >> more) throw BadLine{"'" + more + "' is one word too many"};
    return threads;
  }
  // The kernel, or the names that would have been right at the first wrong place.
  static const Kernel& KernelOf(const IsaTables& isa, const Names& names) {
    std::set<std::string> rules, masters, states;
    for (const Kernel& kernel : isa.kernels) {
      rules.insert(kernel.rule);
      if (kernel.rule != names.rule) continue;
      masters.insert(kernel.master);
      if (kernel.master != names.master) continue;
      states.insert(kernel.state);
      if (kernel.state == names.state) return kernel;
    }
    if (masters.empty()) throw BadLine{"unknown rule '" + names.rule + "': " + Joined(rules)};
    if (states.empty()) {
      throw BadLine{"'" + names.rule + "' has no master '" + names.master + "': " + Joined(masters)};
    }
    throw BadLine{"'" + names.rule + " " + names.master + "' has no state '" + names.state + "': " + Joined(states)};
  }

  // --- the work ---

  static std::vector<double> Defaults(const Kernel& kernel) {
    std::vector<double> hyper;
    for (const Hyper& h : kernel.hypers) hyper.push_back(h.value);
    return hyper;
  }

  double MovedBytes(const Kernel& kernel) const {
    auto bytes = static_cast<double>(gradient_bytes_);
    for (const Plane& plane : kernel.planes) bytes += 2.0 * plane.bytes / plane.per;
    return bytes;
  }

  Tensor& TensorOf(const Kernel& kernel) {
    Tensor& tensor = tensors_[std::string(kernel.rule) + " " + kernel.master + " " + kernel.state];
    if (!tensor.planes.empty()) return tensor;
    for (const Plane& plane : kernel.planes) tensor.planes.emplace_back(PlaneBytes(plane, elements_));
    std::byte* planes[kMaxPlanes];
    for (size_t p = 0; p < tensor.planes.size(); ++p) planes[p] = tensor.planes[p].data();
    const std::vector<float> weights = Values(elements_, 1, 0.02f);
    FindMasterFormat(kernel.master)->load(planes, FindWireFormat("fp32"), weights.data(), 0, elements_);
    return tensor;
  }

  double UpdateLine(std::istream& in) {
    const IsaTables& isa = ReadIsa(in);
    const Kernel& kernel = KernelOf(isa, ReadNames(in));
    const bool stochastic = OneOf(in, "rounding", {"nearest", "stochastic"}) == 1;
    const size_t level = OneOf(in, "statistics", {"off", "core", "full", "dry"});
    const int threads = ReadThreads(in);

    Tensor& tensor = TensorOf(kernel);
    Update update{.grad = gradient_->data(),
                  .grad_format = format_,
                  .n = elements_,
                  .grad_scale = 1,
                  .clip = 1,
                  .random_key = RandomKey(42, ++tensor.steps),
                  .stochastic = stochastic,
                  .dry = level == 3,
                  .statistics = level == 3 ? StatisticsLevel::kCore : static_cast<StatisticsLevel>(level)};
    for (size_t p = 0; p < tensor.planes.size(); ++p) update.planes[p] = tensor.planes[p].data();
    kernel.prepare(Defaults(kernel), tensor.steps, update.constants);
    // Of a rule over matrices the two passes, on one row, without what makes it orthogonal.
    std::vector<float> direction(kernel.fit == nullptr ? 0 : PaddedElements(elements_));
    update.direction = direction.data();
    if (kernel.fit != nullptr) kernel.fit(1, elements_, update.constants);
    return TimeUpdate(kernel, update, threads);
  }

  double TimeUpdate(const Kernel& kernel, Update& update, int threads) const {
    const uint64_t tiles = (elements_ + kTile - 1) / kTile;
    std::vector<TileStatistics> statistics(tiles);
    std::vector<float> sums(tiles);
    auto finish = [&]() noexcept {
      double sum = 0;
      for (const float x : sums) sum += x;
      if (kernel.finish != nullptr) kernel.finish(sum, elements_, update.constants);
    };
    std::barrier measured(threads, finish);
    const double seconds = Time(threads, [&](int i) {
      const uint64_t first = Share(tiles, threads, i), last = Share(tiles, threads, i + 1);
      if (kernel.measure != nullptr) {
        kernel.measure(update, first, last, sums.data() + first);
        measured.arrive_and_wait();
      }
      kernel.update(update, first, last, statistics.data() + first);
    });
    if (Combine(statistics, update.statistics == StatisticsLevel::kFull).rejected > 0) {
      throw BadLine{"a block was rejected: this run's figures mean nothing"};
    }
    return seconds;
  }

  double CurvatureLine(std::istream& in) {
    const IsaTables& isa = ReadIsa(in);
    const Kernel& kernel = KernelOf(isa, ReadNames(in));
    const int threads = ReadThreads(in);
    if (kernel.curvature == nullptr) throw BadLine{std::string("'") + kernel.rule + "' has no second moment"};

    const Tensor& tensor = TensorOf(kernel);
    const std::byte* planes[kMaxPlanes];
    for (size_t p = 0; p < tensor.planes.size(); ++p) planes[p] = tensor.planes[p].data();
    if (!kept_) kept_ = std::make_unique<Buffer>(SampledElements(elements_) * sizeof(float));
    CurvatureProbe probe = ProbeOf(kernel, planes);
    probe.grad = gradient_->data();
    probe.grad_format = format_;
    probe.n = elements_;
    probe.grad_scale = probe.clip = 1;
    probe.preconditioner = kernel.precondition(Defaults(kernel), std::max<uint64_t>(tensor.steps, 1));
    probe.before = reinterpret_cast<float*>(kept_->data());
    const uint64_t tiles = SampledTiles(elements_);
    std::vector<TileCurvature> sums(tiles);
    return Time(threads, [&](int i) {
      const uint64_t first = Share(tiles, threads, i);
      kernel.curvature(probe, first, Share(tiles, threads, i + 1), sums.data() + first);
    });
  }

  double MimicLine(std::istream& in) {
    const Kernel& kernel = KernelOf(*UsableIsas().front(), ReadNames(in));
    const int threads = ReadThreads(in);
    const Tensor& tensor = TensorOf(kernel);
    std::vector<bench::Stream> planes;
    for (size_t p = 0; p < tensor.planes.size(); ++p) {
      const uint64_t row_bytes = kRow * kernel.planes[p].bytes / kernel.planes[p].per;
      planes.push_back({tensor.planes[p].data(), row_bytes});
    }
    const bench::Stream gradient{gradient_->data(), kRow * gradient_bytes_};
    const uint64_t rows = PaddedElements(elements_) / kRow;
    const volatile uint64_t key = 0;
    return Time(threads, [&](int i) {
      const volatile uint64_t seen = bench::Mimic(planes.data(), static_cast<int>(planes.size()), gradient,
                                                  Share(rows, threads, i), Share(rows, threads, i + 1), key);
      (void)seen;
    });
  }

  double MemcpyLine(std::istream& in) {
    uint64_t bytes = 0;
    if (!(in >> bytes) || bytes == 0) throw BadLine{"BYTES must be a positive number"};
    const int threads = ReadThreads(in);
    if (bytes > copied_) {
      from_ = std::make_unique<Buffer>(bytes);
      to_ = std::make_unique<Buffer>(bytes);
      copied_ = bytes;
    }
    return Time(threads, [&](int i) {
      const uint64_t first = Share(bytes, threads, i);
      std::memcpy(to_->data() + first, from_->data() + first, Share(bytes, threads, i + 1) - first);
    });
  }

  const uint64_t elements_;
  const WireIndex format_;
  uint64_t gradient_bytes_;
  std::unique_ptr<Buffer> gradient_, kept_, from_, to_;
  uint64_t copied_ = 0;
  std::map<std::string, Tensor> tensors_;
};

struct Options {
  uint64_t elements = uint64_t{1} << 25;
  std::string gradient = "bf16";
};

Options ReadOptions(int argc, char** argv) {
  Options options;
  for (int i = 1; i < argc; i += 2) {
    const std::string flag = argv[i], value = i + 1 < argc ? argv[i + 1] : "";
    if (flag == "--elements" && std::strtoull(value.c_str(), nullptr, 10) > 0) {
      options.elements = std::strtoull(value.c_str(), nullptr, 10);
    } else if (flag == "--gradient" && (value == "bf16" || value == "fp32")) {
      options.gradient = value;
    } else {
      throw BadLine{"'" + flag + " " + value + "': wanted [--elements N] [--gradient bf16|fp32]"};
    }
  }
  return options;
}

int Main(int argc, char** argv) {
  int code = 0;
  try {
    const Options options = ReadOptions(argc, argv);
    Bench bench(options.elements, options.gradient);
    for (std::string line; std::getline(std::cin, line);) {
      try {
        std::cout << bench.Answer(line) << std::endl;
      } catch (const BadLine& bad) {
        std::cout << "error: " << bad.message << std::endl;
        code = 1;
      }
    }
  } catch (const BadLine& bad) {
    std::cerr << "cpu_kernel_bench: " << bad.message << "\n";
    code = 2;
  }
  return code;
}

}  // namespace
}  // namespace ballast::kernels

int main(int argc, char** argv) { return ballast::kernels::Main(argc, argv); }
