// The CPU's kernels against the GPU's, on a GPU: the same bits everywhere, or exit code 1.
//
//   gpu_identity [--reduced] [--json FILE]
//
//   --reduced     a small part of the cases, for a run under compute-sanitizer
//   --json FILE   the counts, as one JSON object
//
// Walks the registry: every kernel with every gradient format, both roundings and all statistics, tensors of odd sizes
// in one batch, ordinary and adversarial inputs, over several steps; loading, serving and scales of every master;
// sums and measures of gradients; curvature probes; matrices that are made orthogonal, where there is cuBLAS; and what must be
// refused. Memory is poisoned before: past a
// gradient's end with NaN, between arrays with bytes that must still be there afterwards. Exit code 77 where there is
// no GPU.
#include "tests/kernels/cuda/gpu_identity.h"

#include <fstream>

#include "kernels/registry.h"

namespace ballast::kernels {
namespace {

struct Options {
  Extent extent{.reduced = false};
  std::string json;
};

bool ReadOptions(int argc, char** argv, Options* options) {
  for (int i = 1; i < argc; ++i) {
    const std::string flag = argv[i];
    if (flag == "--reduced") {
      options->extent.reduced = true;
    } else if (flag == "--json" && i + 1 < argc) {
      options->json = argv[++i];
    } else {
      std::cerr << "gpu_identity: '" << flag << "': wanted [--reduced] [--json FILE]\n";
      return false;
    }
  }
  return true;
}

void WriteJson(const std::string& path, const Options& options, const Findings& f, const std::string& failure) {
  const auto quoted = [](std::string text) {
    for (char& c : text) c = c == '"' || c == '\\' || c < ' ' ? '\'' : c;
    return '"' + text + '"';
  };
  std::ofstream(path) << "{\"reduced\": " << (options.extent.reduced ? "true" : "false") << ", \"isa\": \"" << IsaName()
                      << "\", \"kernels\": " << Kernels().size() << ", \"masters\": " << MasterFormats().size()
                      << ", \"states\": " << f.compared() << ", \"blocks\": " << f.blocks()
                      << ", \"rejected\": " << f.rejected() << ", \"checks\": " << f.checks()
                      << ", \"differences\": " << f.differences() << ", \"first\": " << quoted(f.first())
                      << ", \"failure\": " << quoted(failure) << "}\n";
}

void CompareAll(const Extent& extent, Findings* findings) {
  Check(cudaSetDevice(0), "cudaSetDevice");
  const Stream stream;
  findings->Expect(CudaKernels().size() == Kernels().size(), "the number of kernels");
  findings->Expect(CudaMasters().size() == MasterFormats().size(), "the number of masters");
  CompareDivisions(stream, findings);
  CompareUpdates(extent, stream, findings);
  CompareManyTensors(extent, stream, findings);
  CompareCodecs(extent, stream, findings);
  CompareSums(extent, stream, findings);
  CompareMeasures(extent, stream, findings);
  CompareProbes(extent, stream, findings);
  CompareMatrices(extent, stream, findings);
  CheckRefusals(stream, findings);
}

int Main(int argc, char** argv) {
  Options options;
  if (!ReadOptions(argc, argv, &options)) return 2;
  if (const std::string why = WhyNoGpu(); !why.empty()) {
    std::cout << "!! NO GPU (" << why << "): NOTHING WAS COMPARED" << std::endl;
    return kNoGpuExitCode;
  }
  Findings findings;
  std::string failure;
  try {
    CompareAll(options.extent, &findings);
  } catch (const CudaFailure& error) {
    failure = error.what();
    std::cout << "FAILED: " << failure << std::endl;
  }
  std::cout << findings.compared() << " states compared (" << Kernels().size() << " kernels, CPU isa " << IsaName()
            << "), " << findings.differences() << " differences, " << findings.rejected() << " of " << findings.blocks()
            << " blocks rejected, " << findings.checks() << " other checks" << std::endl;
  if (!options.json.empty()) WriteJson(options.json, options, findings, failure);
  return failure.empty() && findings.differences() == 0 ? 0 : 1;
}

}  // namespace
}  // namespace ballast::kernels

int main(int argc, char** argv) { return ballast::kernels::Main(argc, argv); }
