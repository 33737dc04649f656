#include <dlfcn.h>

#include <utility>

#include "kernels/cuda/cuda_launch.h"
#include "kernels/cuda/cuda_orthogonalizer.h"
#include "kernels/layout.h"
#include "kernels/matrix/newton_schulz.h"

namespace ballast::kernels {
inline namespace BALLAST_UNIT {

using Bf16 = uint16_t;  // its bits

// The root of the sum of squares, or the least norm.
__global__ void __launch_bounds__(kGroupThreads) TakeNorm(const DeviceUpdate* item, float* norm) {
  if (WarpNumber() != 0) return;
  const double squares = SumOfTiles(item->sums, TilesOf(item->update.n));
  if (threadIdx.x == 0) *norm = fmaxf(static_cast<float>(sqrt(squares)), item->update.least_norm);
}

// x = bf16(u / norm).
__global__ void __launch_bounds__(kGroupThreads) Normalize(const float* u, const float* norm, uint64_t n, Bf16* x) {
  const uint64_t threads = uint64_t{gridDim.x} * kGroupThreads;
  for (uint64_t i = blockIdx.x * uint64_t{kGroupThreads} + threadIdx.x; i < n; i += threads) {
    const uint32_t bits = __float_as_uint(__fdiv_rn(u[i], *norm));
    x[i] = static_cast<Bf16>((bits + 0x7fff + (bits >> 16 & 1)) >> 16);  // to nearest even
  }
}

__global__ void __launch_bounds__(kGroupThreads) Widen(const Bf16* x, uint64_t n, float* to) {
  const uint64_t threads = uint64_t{gridDim.x} * kGroupThreads;
  for (uint64_t i = blockIdx.x * uint64_t{kGroupThreads} + threadIdx.x; i < n; i += threads) {
    to[i] = __uint_as_float(uint32_t{x[i]} << 16);
  }
}

}  // namespace BALLAST_UNIT

namespace {

constexpr uint64_t kAlignment = 256;
constexpr size_t kWorkspace = size_t{32} << 20;  // what cuBLAS would take on a Hopper by itself
constexpr uint64_t kTried = 16;                  // rows and columns of a first product, in memory behind it

uint64_t Warps(uint64_t elements) { return (elements + kWarpThreads - 1) / kWarpThreads; }

// Where a matrix's parts are in its room, in bf16: X and what it becomes, the Gram matrix and the factor.
struct Parts {
  Bf16 *x, *next, *gram, *factor;

  Parts(std::byte* room, uint64_t n, uint64_t side) {
    for (auto [part, elements] : {std::pair{&x, n}, {&next, n}, {&gram, side * side}, {&factor, side * side}}) {
      *part = reinterpret_cast<Bf16*>(room);
      room += (elements * sizeof(Bf16) + kAlignment - 1) / kAlignment * kAlignment;
    }
  }
};

// The first that was noted.
struct Failure {
  std::string what;

  void Note(cudaError_t error) {
    if (error == cudaSuccess || !what.empty()) return;
    what = std::string(cudaGetErrorString(error)) + " (" + cudaGetErrorName(error) + ")";
  }
  void NoteProduct(int status) {
    if (status != 0 && what.empty()) what = "cuBLAS made no product: its status is " + std::to_string(status);
  }
};

}  // namespace

// The few of its functions that are needed, as cuBLAS declares them; they are found by name in whichever version there is.
class CudaOrthogonalizer::Cublas {
 public:
  // Whether the library of that name is there, has them, makes a handle, and multiplies on this GPU.
  bool Open(const char* name, CudaStream stream);
  ~Cublas() {
    if (handle_ != nullptr) destroy_(handle_);
    cudaFree(workspace_);
  }
  std::string Version() const {
    int version = 0;
    version_(handle_, &version);
    return std::to_string(version);
  }

  // C = alpha op(A) op(B) + beta C, column after column: op(A) m x k, op(B) k x n.
  struct Operand {
    const Bf16* data;
    uint64_t stride;
    bool transposed = false;
  };
  // Returns cuBLAS's status, 0 for success.
  int Multiply(Operand a, Operand b, uint64_t m, uint64_t n, uint64_t k, float alpha, float beta, Bf16* c,
               uint64_t stride) const {
    constexpr int kFp32 = 68, kAnyAlgorithm = -1;  // CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT
    const auto whole = [](uint64_t x) { return static_cast<int>(x); };
    return multiply_(handle_, a.transposed, b.transposed, whole(m), whole(n), whole(k), &alpha, a.data, CUDA_R_16BF,
                     whole(a.stride), b.data, CUDA_R_16BF, whole(b.stride), &beta, c, CUDA_R_16BF, whole(stride), kFp32,
                     kAnyAlgorithm);
  }

 private:
  using Handle = void*;
  bool Try() const;
  template <class Function>
  bool Find(void* library, const char* name, Function** found) {
    *found = reinterpret_cast<Function*>(dlsym(library, name));
    return *found != nullptr;
  }

  Handle handle_ = nullptr;
  void* workspace_ = nullptr;
  int (*create_)(Handle*) = nullptr;
  int (*destroy_)(Handle) = nullptr;
  int (*version_)(Handle, int*) = nullptr;
  int (*set_stream_)(Handle, CudaStream) = nullptr;
  int (*set_workspace_)(Handle, void*, size_t) = nullptr;
  int (*set_math_mode_)(Handle, int) = nullptr;
  int (*multiply_)(Handle, int, int, int, int, int, const void*, const void*, cudaDataType, int, const void*,
                   cudaDataType, int, const void*, void*, cudaDataType, int, int, int) = nullptr;
};

bool CudaOrthogonalizer::Cublas::Try() const {
  auto* const tried = reinterpret_cast<Bf16*>(static_cast<std::byte*>(workspace_) + kWorkspace);
  const Operand operand{tried, kTried};
  return Multiply(operand, operand, kTried, kTried, kTried, 0, 0, tried, kTried) == 0;
}

bool CudaOrthogonalizer::Cublas::Open(const char* name, CudaStream stream) {
  void* const library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) return false;
  const bool found = Find(library, "cublasCreate_v2", &create_) && Find(library, "cublasDestroy_v2", &destroy_) &&
                     Find(library, "cublasGetVersion_v2", &version_) &&
                     Find(library, "cublasSetStream_v2", &set_stream_) &&
                     Find(library, "cublasSetWorkspace_v2", &set_workspace_) &&
                     Find(library, "cublasSetMathMode", &set_math_mode_) && Find(library, "cublasGemmEx", &multiply_);
  constexpr int kSumsInFp32 = 16;  // CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION
  const bool opened = found && create_(&handle_) == 0 && set_stream_(handle_, stream) == 0 &&
                      cudaMalloc(&workspace_, kWorkspace + kTried * kTried * sizeof(Bf16)) == cudaSuccess &&
                      set_workspace_(handle_, workspace_, kWorkspace) == 0 &&
                      set_math_mode_(handle_, kSumsInFp32) == 0 && Try();
  if (!opened) cudaGetLastError();  // a refusal is no failure of the device
  return opened;
}

CudaOrthogonalizer::CudaOrthogonalizer(std::unique_ptr<Cublas> cublas, CudaStream stream, std::string library)
    : cublas_(std::move(cublas)), stream_(stream), library_(std::move(library)) {}
CudaOrthogonalizer::~CudaOrthogonalizer() = default;

std::unique_ptr<CudaOrthogonalizer> CudaOrthogonalizer::Open(CudaStream stream, std::string* why) {
  for (const char* name : {"libcublas.so.13", "libcublas.so.12", "/usr/local/cuda/lib64/libcublas.so.13",
                           "/usr/local/cuda/lib64/libcublas.so.12"}) {
    auto cublas = std::make_unique<Cublas>();
    if (!cublas->Open(name, stream)) continue;
    std::string library = "cuBLAS " + cublas->Version();
    return std::unique_ptr<CudaOrthogonalizer>(new CudaOrthogonalizer(std::move(cublas), stream, std::move(library)));
  }
  *why =
      "cuBLAS (libcublas.so.13 or .12) is not found, or makes no handle and no product on this GPU, whose memory is to "
      "have 32 MiB for it: install CUDA's package libcublas, or name its folder in LD_LIBRARY_PATH";
  return nullptr;
}

// To cuBLAS, which goes by columns, a matrix of rows is its transpose: X is `columns` x `rows` there, with that many between
// its columns, and a symmetric one is itself.
std::string CudaOrthogonalizer::Run(const DeviceMatrix& m) {
  const uint64_t n = m.rows * m.columns, side = std::min(m.rows, m.columns);
  if (n == 0) return "";
  Parts parts(m.room, n, side);
  auto* const norm = reinterpret_cast<float*>(parts.gram);  // until there is one
  Failure failure;
  failure.Note(Launch<&TakeNorm>(1, stream_, m.update, norm));
  failure.Note(Launch<&Normalize>(Warps(n), stream_, m.direction, norm, n, parts.x));
  const auto copy = [&](Bf16* to, const Bf16* from, uint64_t elements) {
    failure.Note(cudaMemcpyAsync(to, from, elements * sizeof(Bf16), cudaMemcpyDeviceToDevice, stream_));
  };
  const auto multiply = [&](auto... product) { failure.NoteProduct(cublas_->Multiply(product...)); };
  const bool wide = m.rows <= m.columns;
  for (int step = 0; step < kNewtonSchulzSteps && failure.what.empty(); ++step) {
    const Cublas::Operand x{parts.x, m.columns}, gram{parts.gram, side}, factor{parts.factor, side};
    const Cublas::Operand turned{parts.x, m.columns, true};
    wide ? multiply(turned, x, side, side, m.columns, 1, 0, parts.gram, side)
         : multiply(x, turned, side, side, m.rows, 1, 0, parts.gram, side);
    copy(parts.factor, parts.gram, side * side);
    multiply(gram, gram, side, side, side, kOfSquare, kOfGram, parts.factor, side);
    copy(parts.next, parts.x, n);
    wide ? multiply(x, factor, m.columns, m.rows, side, 1, kOfX, parts.next, m.columns)
         : multiply(factor, x, m.columns, m.rows, side, 1, kOfX, parts.next, m.columns);
    std::swap(parts.x, parts.next);
  }
  if (failure.what.empty()) failure.Note(Launch<&Widen>(Warps(n), stream_, parts.x, n, m.direction));
  return failure.what;
}

}  // namespace ballast::kernels
