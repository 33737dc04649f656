#include "kernels/matrix/newton_schulz.h"

#include <bit>
#include <cmath>
#include <utility>
#include <vector>

namespace ballast::kernels {
namespace {

// What a thread takes at once: a block of a product, or so many numbers.
constexpr uint64_t kBlockSide = 256, kGrain = 1 << 16;

// To nearest even.
float Bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

uint64_t BlocksOf(uint64_t side) { return (side + kBlockSide - 1) / kBlockSide; }

class Iteration {
 public:
  Iteration(const MatrixProduct& product, uint64_t rows, uint64_t columns, float* room, const ShareWork& share)
      : product_(product),
        rows_(rows),
        columns_(columns),
        side_(std::min(rows, columns)),
        gram_(room),
        factor_(room + side_ * side_),
        share_(share) {}

  void Take(const float* from, float* to) const {
    MakeGram(from);
    MakeFactor();
    Apply(from, to);
  }

 private:
  bool wide() const { return rows_ <= columns_; }

  // Act on each block of a matrix: its first row and column, and how many it has of both.
  using OnBlock = std::function<void(uint64_t row, uint64_t column, uint64_t rows, uint64_t columns)>;
  void ForBlocks(uint64_t rows, uint64_t columns, const OnBlock& act) const {
    const uint64_t across = BlocksOf(columns);
    share_(BlocksOf(rows) * across, [&](uint64_t i) {
      const uint64_t row = i / across * kBlockSide, column = i % across * kBlockSide;
      act(row, column, std::min(kBlockSide, rows - row), std::min(kBlockSide, columns - column));
    });
  }
  // Of a symmetric one those on and below the diagonal; `act` returns what becomes of each number, and of its mirror
  // image.
  template <class Multiply, class Finish>
  void MakeSymmetric(float* to, const Multiply& multiply, const Finish& finish) const {
    ForBlocks(side_, side_, [&](uint64_t row, uint64_t column, uint64_t rows, uint64_t columns) {
      if (column > row) return;
      multiply(row, column, rows, columns, to + row * side_ + column);
      for (uint64_t i = row; i < row + rows; ++i) {
        for (uint64_t j = column; j < std::min(column + columns, i + 1); ++j) {
          to[i * side_ + j] = to[j * side_ + i] = finish(i * side_ + j, to[i * side_ + j]);
        }
      }
    });
  }

  void MakeGram(const float* x) const {
    const auto multiply = [&](uint64_t row, uint64_t column, uint64_t rows, uint64_t columns, float* to) {
      if (wide()) {
        product_.multiply({x + row * columns_, columns_}, {x + column * columns_, columns_, true}, rows, columns,
                          columns_, to, side_);
      } else {
        product_.multiply({x + row, columns_, true}, {x + column, columns_}, rows, columns, rows_, to, side_);
      }
    };
    MakeSymmetric(gram_, multiply, [](uint64_t, float sum) { return Bf16(sum); });
  }
  void MakeFactor() const {
    const auto multiply = [&](uint64_t row, uint64_t column, uint64_t rows, uint64_t columns, float* to) {
      product_.multiply({gram_ + row * side_, side_}, {gram_ + column, side_}, rows, columns, side_, to, side_);
    };
    MakeSymmetric(factor_, multiply,
                  [this](uint64_t i, float sum) { return Bf16(kOfGram * gram_[i] + kOfSquare * sum); });
  }
  void Apply(const float* from, float* to) const {
    ForBlocks(rows_, columns_, [&](uint64_t row, uint64_t column, uint64_t rows, uint64_t columns) {
      float* const block = to + row * columns_ + column;
      if (wide()) {
        product_.multiply({factor_ + row * side_, side_}, {from + column, columns_}, rows, columns, side_, block,
                          columns_);
      } else {
        product_.multiply({from + row * columns_, columns_}, {factor_ + column, side_}, rows, columns, side_, block,
                          columns_);
      }
      for (uint64_t i = 0; i < rows; ++i) {
        const float* const x = from + (row + i) * columns_ + column;
        for (uint64_t j = 0; j < columns; ++j) block[i * columns_ + j] = Bf16(kOfX * x[j] + block[i * columns_ + j]);
      }
    });
  }

  const MatrixProduct& product_;
  const uint64_t rows_, columns_, side_;
  float *const gram_, *const factor_;  // side x side
  const ShareWork& share_;
};

}  // namespace

void OrthogonalizeMatrix(const MatrixProduct& product, uint64_t rows, uint64_t columns, double squares,
                         float least_norm, float* matrix, float* room, const ShareWork& share) {
  const float norm = std::max(static_cast<float>(std::sqrt(squares)), least_norm);
  const uint64_t n = rows * columns;
  share((n + kGrain - 1) / kGrain, [&](uint64_t grain) {
    const uint64_t last = std::min(n, (grain + 1) * kGrain);
    for (uint64_t i = grain * kGrain; i < last; ++i) room[i] = Bf16(matrix[i] / norm);
  });
  const Iteration iteration(product, rows, columns, room + n, share);
  float *from = room, *to = matrix;
  for (int step = 0; step < kNewtonSchulzSteps; ++step, std::swap(from, to)) iteration.Take(from, to);
}

void OrthogonalizeAlone(uint64_t rows, uint64_t columns, double squares, float least_norm, float* matrix) {
  std::vector<float> room(OrthogonalizingRoom(rows, columns));
  OrthogonalizeMatrix(FastestProduct(), rows, columns, squares, least_norm, matrix, room.data(), &WorkAlone);
}

}  // namespace ballast::kernels
