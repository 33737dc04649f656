#include "kernels/matrix/newton_schulz.h"

#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <limits>
#include <random>
#include <thread>
#include <vector>

namespace ballast::kernels {
namespace {

using Matrix = std::vector<double>;  // row after row

float Bf16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  return std::bit_cast<float>((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
}

std::vector<float> Normals(uint64_t n) {
  std::mt19937_64 engine(n);
  std::vector<float> values(n);
  for (float& x : values) {  // the sum of twelve: the same on every machine
    double sum = -6;
    for (int i = 0; i < 12; ++i) sum += static_cast<double>(engine() >> 11) * 0x1p-53;
    x = Bf16(static_cast<float>(sum));
  }
  return values;
}

double SquaresOf(const std::vector<float>& values) {
  double sum = 0;
  for (const float x : values) sum += static_cast<double>(x) * static_cast<double>(x);
  return sum;
}

Matrix Product(const Matrix& a, const Matrix& b, uint64_t m, uint64_t n, uint64_t k) {
  Matrix c(m * n);
  for (uint64_t i = 0; i < m; ++i) {
    for (uint64_t p = 0; p < k; ++p) {
      for (uint64_t j = 0; j < n; ++j) c[i * n + j] += a[i * k + p] * b[p * n + j];
    }
  }
  return c;
}
Matrix Transposed(const Matrix& a, uint64_t rows, uint64_t columns) {
  Matrix t(a.size());
  for (uint64_t i = 0; i < rows; ++i) {
    for (uint64_t j = 0; j < columns; ++j) t[j * rows + i] = a[i * columns + j];
  }
  return t;
}

// The iteration in double, without roundings.
Matrix Exact(const std::vector<float>& u, uint64_t rows, uint64_t columns) {
  Matrix x(u.begin(), u.end());
  const double norm = std::sqrt(SquaresOf(u));
  for (double& one : x) one /= norm;
  if (rows > columns) {
    const Matrix t = Transposed(x, rows, columns);
    return Transposed(Exact({t.begin(), t.end()}, columns, rows), columns, rows);
  }
  for (int step = 0; step < 5; ++step) {
    const Matrix gram = Product(x, Transposed(x, rows, columns), rows, rows, columns);
    Matrix factor = Product(gram, gram, rows, rows, rows);
    for (size_t i = 0; i < factor.size(); ++i) factor[i] = -4.7750 * gram[i] + 2.0315 * factor[i];
    const Matrix moved = Product(factor, x, rows, columns, rows);
    for (size_t i = 0; i < x.size(); ++i) x[i] = 3.4445 * x[i] + moved[i];
  }
  return x;
}

std::vector<float> Made(const MatrixProduct& product, std::vector<float> u, uint64_t rows, uint64_t columns,
                        const ShareWork& share = WorkAlone) {
  std::vector<float> room(OrthogonalizingRoom(rows, columns));
  OrthogonalizeMatrix(product, rows, columns, SquaresOf(u), 1e-7f, u.data(), room.data(), share);
  return u;
}

// |a - b| over |b|.
double Distance(const std::vector<float>& a, const Matrix& b) {
  double off = 0, all = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    off += (static_cast<double>(a[i]) - b[i]) * (static_cast<double>(a[i]) - b[i]);
    all += b[i] * b[i];
  }
  return std::sqrt(off / all);
}

struct Shape {
  uint64_t rows, columns;
};
// Wide, tall, square; of more than one block of a product in either direction, and of one row or column.
constexpr Shape kShapes[] = {{5, 7}, {7, 5}, {300, 40}, {40, 300}, {260, 270}, {1, 9}, {9, 1}};

TEST(NewtonSchulzTest, IsTheIterationToTheRoundingOfBf16) {
  for (const Shape& shape : kShapes) {
    SCOPED_TRACE(std::to_string(shape.rows) + " x " + std::to_string(shape.columns));
    const std::vector<float> u = Normals(shape.rows * shape.columns);
    const Matrix wanted = Exact(u, shape.rows, shape.columns);
    // Five steps of 2^-9 each, which the iteration enlarges up to 3.4 times.
    EXPECT_LT(Distance(Made(FastestProduct(), u, shape.rows, shape.columns), wanted), 0.03) << FastestProduct().library;
    EXPECT_LT(Distance(Made(PlainProduct(), u, shape.rows, shape.columns), wanted), 0.03);
  }
}

TEST(NewtonSchulzTest, TheBitsDoNotDependOnThreads) {
  const ShareWork by_two = [](uint64_t count, const std::function<void(uint64_t)>& act) {
    std::thread other([&] {
      for (uint64_t i = 1; i < count; i += 2) act(i);
    });
    for (uint64_t i = (count + 1) / 2; i-- > 0;) act(2 * i);
    other.join();
  };
  for (const Shape& shape : kShapes) {
    const std::vector<float> u = Normals(shape.rows * shape.columns);
    EXPECT_EQ(Made(FastestProduct(), u, shape.rows, shape.columns),
              Made(FastestProduct(), u, shape.rows, shape.columns, by_two));
  }
}

TEST(NewtonSchulzTest, NothingStaysNothing) {
  EXPECT_EQ(Made(FastestProduct(), std::vector<float>(12), 3, 4), std::vector<float>(12));
}

TEST(NewtonSchulzTest, ANormThatOverflowsTakesNoStep) {
  std::vector<float> u(12, 0x1p100f), room(OrthogonalizingRoom(3, 4));
  OrthogonalizeMatrix(FastestProduct(), 3, 4, std::numeric_limits<double>::infinity(), 1e-7f, u.data(), room.data(),
                      WorkAlone);
  EXPECT_EQ(u, std::vector<float>(12));
}

TEST(MatrixProductTest, EveryTranspositionIsTheProduct) {
  constexpr uint64_t kM = 37, kN = 21, kK = 50;
  const std::vector<float> a = Normals(kM * kK), b = Normals(kK * kN);
  const Matrix wanted = Product({a.begin(), a.end()}, {b.begin(), b.end()}, kM, kN, kK);
  const Matrix a_transposed = Transposed({a.begin(), a.end()}, kM, kK),
               b_transposed = Transposed({b.begin(), b.end()}, kK, kN);
  const std::vector<float> at(a_transposed.begin(), a_transposed.end()), bt(b_transposed.begin(), b_transposed.end());
  for (const MatrixProduct* product : {&FastestProduct(), &PlainProduct()}) {
    for (const bool ta : {false, true}) {
      for (const bool tb : {false, true}) {
        std::vector<float> c(kM * (kN + 3), 1e30f);  // rows with room behind them, which stays
        const MatrixProduct::Operand left =
            ta ? MatrixProduct::Operand{at.data(), kM, true} : MatrixProduct::Operand{a.data(), kK};
        const MatrixProduct::Operand right =
            tb ? MatrixProduct::Operand{bt.data(), kK, true} : MatrixProduct::Operand{b.data(), kN};
        product->multiply(left, right, kM, kN, kK, c.data(), kN + 3);
        for (uint64_t i = 0; i < kM; ++i) {
          for (uint64_t j = 0; j < kN + 3; ++j) {
            const float got = c[i * (kN + 3) + j];
            ASSERT_TRUE(j < kN ? std::abs(static_cast<double>(got) - wanted[i * kN + j]) < 1e-4 : got == 1e30f)
                << product->library << " " << ta << tb << " at " << i << ", " << j;
          }
        }
      }
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
