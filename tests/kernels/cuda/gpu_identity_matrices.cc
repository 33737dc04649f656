// Matrices made orthogonal on the GPU, by cuBLAS.
#include <bit>
#include <cmath>

#include "kernels/cuda/cuda_orthogonalizer.h"
#include "kernels/matrix/newton_schulz.h"
#include "kernels/registry.h"
#include "tests/kernels/cuda/gpu_identity.h"
#include "tests/kernels/tensor.h"

namespace ballast::kernels {
namespace {

struct Shape {
  uint64_t rows, columns;
};

// U as a first pass leaves it.
std::vector<float> Directions(const Shape& shape) {
  std::vector<float> u = Normals(shape.rows * 31 + shape.columns).Vector(shape.rows * shape.columns, 1e-3);
  for (float& x : u) x = std::bit_cast<float>(std::bit_cast<uint32_t>(x) & 0xffff0000u);
  return u;
}

std::vector<float> OnHost(const Shape& shape, std::vector<float> u, double squares) {
  OrthogonalizeAlone(shape.rows, shape.columns, squares, 1e-7f, u.data());
  return u;
}

// Of these tiles' sums.
std::vector<float> OnDevice(CudaOrthogonalizer* orthogonalizer, const Shape& shape, const std::vector<float>& u,
                            const std::vector<float>& sums, const Stream& stream) {
  const DeviceArray direction = Uploaded(u, stream), device_sums = Uploaded(sums, stream);
  const DeviceArray room(OrthogonalizingRoom(shape.rows, shape.columns) * sizeof(float));
  DeviceUpdate item{.update = {}, .first_tile = 0, .tiles = nullptr, .sums = device_sums.as<float>()};
  item.update.n = u.size();
  item.update.least_norm = 1e-7f;
  const DeviceArray device_item = Uploaded(std::vector{item}, stream);
  Check(orthogonalizer->Run({.update = device_item.as<DeviceUpdate>(),
                             .rows = shape.rows,
                             .columns = shape.columns,
                             .direction = direction.as<float>(),
                             .room = room.as<std::byte>()}),
        "making a matrix orthogonal");
  return Downloaded<float>(direction, stream);
}

double Distance(const std::vector<float>& a, const std::vector<float>& b) {
  double difference = 0, size = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    difference += std::pow(static_cast<double>(a[i]) - b[i], 2);
    size += std::pow(static_cast<double>(b[i]), 2);
  }
  return std::sqrt(difference / size);
}

// Five steps of bf16 are some 1 % from the exact ones, whichever order the sums have.
constexpr double kNear = 0.03;

void CompareOne(CudaOrthogonalizer* orthogonalizer, const Shape& shape, const Stream& stream, Findings* findings) {
  const std::string name = std::to_string(shape.rows) + " x " + std::to_string(shape.columns);
  const std::vector<float> u = Directions(shape);
  std::vector<float> sums(TilesOf(u.size()));
  for (size_t i = 0; i < u.size(); ++i) sums[i / kTile] += u[i] * u[i];
  double squares = 0;
  for (const float sum : sums) squares += static_cast<double>(sum);
  const std::vector<float> got = OnDevice(orthogonalizer, shape, u, sums, stream);
  findings->Compared(u.size());
  const double distance = Distance(got, OnHost(shape, u, squares));
  findings->Expect(distance < kNear, name + ": " + std::to_string(distance) + " from the CPU's orthogonal matrix");
  findings->Expect(got == OnDevice(orthogonalizer, shape, u, sums, stream), name + ": other bits the second time");
}

}  // namespace

void CompareMatrices(const Extent& extent, const Stream& stream, Findings* findings) {
  std::string why;
  const std::unique_ptr<CudaOrthogonalizer> orthogonalizer = CudaOrthogonalizer::Open(stream.get(), &why);
  if (orthogonalizer == nullptr) {
    std::cout << "!! NOT COMPARED: matrices made orthogonal: " << why << std::endl;
    return;
  }
  std::cout << "matrices made orthogonal by " << orthogonalizer->library() << std::endl;
  std::vector<Shape> shapes = {{1, 1}, {1, 40}, {40, 1}, {33, 57}, {57, 33}, {64, 64}};
  if (!extent.reduced) shapes.insert(shapes.end(), {{129, 1000}, {1000, 129}, {256, 1024}, {512, 512}});
  for (const Shape& shape : shapes) CompareOne(orthogonalizer.get(), shape, stream, findings);
}

}  // namespace ballast::kernels
