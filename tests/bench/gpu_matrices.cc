#include "tests/bench/gpu_matrices.h"

#include <memory>
#include <string>

#include "kernels/cuda/cuda_orthogonalizer.h"
#include "kernels/matrix/newton_schulz.h"
#include "kernels/registry.h"
#include "tests/bench/gpu_tensors.h"
#include "tests/bench/gpu_timer.h"

namespace ballast::kernels {
namespace {

struct Shape {
  uint64_t rows, columns;
};
constexpr Shape kShapes[] = {{1024, 1024}, {4096, 4096}, {4096, 14336}, {14336, 4096}};

// One matrix in the default formats, to be updated again and again.
class MatrixUpdate {
 public:
  MatrixUpdate(const Shape& shape, CudaOrthogonalizer* orthogonalizer, const Stream& stream)
      : shape_(shape),
        kernel_(*FindKernel("muon", "split24", "companded8")),
        work_{"", {shape.rows * shape.columns}, true},
        orthogonalizer_(*orthogonalizer),
        stream_(stream),
        tensors_(kernel_, work_, stream),
        direction_(PaddedElements(work_.sizes[0]) * sizeof(float)),
        room_(OrthogonalizingRoom(shape.rows, shape.columns) * sizeof(float)),
        batch_(WithDirection(tensors_.Batch({true, StatisticsLevel::kCore}))) {}

  void Launch() const {
    const CudaKernel& cuda = CudaKernels()[static_cast<size_t>(&kernel_ - Kernels().data())];
    auto* const item = batch_.as<DeviceUpdate>();
    const uint64_t tiles = TilesOf(work_.sizes[0]);
    Check(cuda.direct(item, 1, tiles, stream_.get()), "the first pass");
    Check(orthogonalizer_.Run({.update = item,
                               .rows = shape_.rows,
                               .columns = shape_.columns,
                               .direction = direction_.as<float>(),
                               .room = room_.as<std::byte>()}),
          "making it orthogonal");
    Check(cuda.update(item, 1, tiles, true, stream_.get()), "the second pass");
  }

 private:
  DeviceArray WithDirection(const DeviceArray& batch) const {
    std::vector<DeviceUpdate> items = Downloaded<DeviceUpdate>(batch, stream_);
    Update& u = items[0].update;
    u.direction = direction_.as<float>();
    u.rows = shape_.rows;
    u.least_norm = kernel_.fit(shape_.rows, shape_.columns, u.constants);
    return Uploaded(items, stream_);
  }

  const Shape shape_;
  const Kernel& kernel_;
  const Work work_;
  CudaOrthogonalizer& orthogonalizer_;
  const Stream& stream_;
  const Tensors tensors_;
  const DeviceArray direction_, room_, batch_;
};

}  // namespace

void BenchMatrices(int rounds, const Stream& stream, std::ostream& out) {
  std::string why;
  const std::unique_ptr<CudaOrthogonalizer> orthogonalizer = CudaOrthogonalizer::Open(stream.get(), &why);
  Timer timer;
  for (const Shape& shape : kShapes) {
    out << "{\"matrix\": \"" << shape.rows << " x " << shape.columns << "\", \"what\": \"ballast muon\", ";
    if (orthogonalizer == nullptr) {
      out << "\"skipped\": \"" << why << "\"}" << std::endl;
      continue;
    }
    const MatrixUpdate update(shape, orthogonalizer.get(), stream);
    std::vector<double> ms;
    for (int round = -2; round < rounds; ++round) {
      const double seconds = timer.Seconds([&] { update.Launch(); }, stream);
      if (round >= 0) ms.push_back(1e3 * seconds);
    }
    out << "\"ms\": " << Quartiles(ms) << ", \"rounds\": " << rounds << "}" << std::endl;
  }
}

}  // namespace ballast::kernels
