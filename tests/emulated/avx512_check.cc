// Checks that the emulated processor computes as a real one does, so that what runs on it proves something.
//
// Every operation runs with the 128-bit scalar, the 256-bit AVX2 and, where the processor has it, the 512-bit AVX-512
// instruction over all combinations of the IEEE corner cases and over random bit patterns; the results must be the same
// bits. The scalar results' digests are printed: run it on the real processor too and compare.
//
// Known: Bochs 2.7's vcvtps2ph rounds ties away from zero instead of to even, in every width alike. Its digest differs
// from a real processor's, and so will a kernel that converts to half precision with it. All else tried here is the
// same.
//
//   g++ -std=c++20 -O2 -static -o avx512_check tests/emulated/avx512_check.cc
//   ./avx512_check; tests/emulated/run.sh ./avx512_check
//
// `avx512_check speed COUNT` instead divides, multiplies and adds, and stores, COUNT times sixteen numbers.
#include <immintrin.h>

#include <array>
#include <bit>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <span>
#include <vector>

namespace {

constexpr int kLanes = 16;
constexpr int kRandomGroups = 20000;
using Lanes = std::array<uint32_t, kLanes>;

struct Group {
  alignas(64) Lanes a, b, c;
};

// The signless bits of zero, subnormals, the normals' edges, ties, infinity, quiet and signalling NaN.
constexpr uint32_t kCorners[] = {0x00000000, 0x00000001, 0x00000003, 0x00400000, 0x007fffff, 0x00800000,
                                 0x00800001, 0x33800000, 0x34000000, 0x3effffff, 0x3f000000, 0x3f7fffff,
                                 0x3f800000, 0x3f800001, 0x3fc00000, 0x40200000, 0x4b7fffff, 0x4f000000,
                                 0x7f7fffff, 0x7f800000, 0x7fc01234, 0x7f800123};

bool HasAvx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
}

std::vector<uint32_t> SignedCorners() {
  std::vector<uint32_t> corners(std::begin(kCorners), std::end(kCorners));
  for (const uint32_t bits : kCorners) corners.push_back(bits | 0x80000000u);
  return corners;
}

std::vector<Group> MakeGroups() {
  const std::vector<uint32_t> corners = SignedCorners();
  const size_t n = corners.size();
  std::vector<Group> groups((n * n * n + kLanes - 1) / kLanes + 2 * kRandomGroups);
  std::mt19937 random(20240229);
  size_t at = 0;
  for (Group& group : groups) {
    for (int lane = 0; lane < kLanes; ++lane, ++at) {
      if (at < n * n * n) {
        group.a[lane] = corners[at % n];
        group.b[lane] = corners[at / n % n];
        group.c[lane] = corners[at / n / n];
        continue;
      }
      const bool any_bits = at % 2 == 0;  // otherwise exponents near one's, where sums and products round
      for (Lanes* lanes : {&group.a, &group.b, &group.c}) {
        const uint32_t bits = static_cast<uint32_t>(random());
        (*lanes)[lane] = any_bits ? bits : (bits & 0x83ffffffu) + 0x3d000000u;
      }
    }
  }
  return groups;
}

// One operation in its three widths. Inline assembly: a compiler may swap operands, which shows in a NaN's payload.
#define BALLAST_BINARY(Name, scalar, packed)                                                     \
  struct Name {                                                                                  \
    static constexpr const char* kName = #packed;                                                \
    static uint32_t Scalar(uint32_t a, uint32_t b, uint32_t) {                                   \
      __m128 r = _mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(a)));                       \
      const __m128 y = _mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(b)));                 \
      asm(scalar " %1, %0, %0" : "+x"(r) : "x"(y));                                              \
      return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_castps_si128(r)));                      \
    }                                                                                            \
    [[gnu::target("avx2,fma")]] static void Avx2(const Group& g, Lanes& out) {                   \
      for (int i = 0; i < kLanes; i += 8) {                                                      \
        __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&g.a[i]));               \
        asm(#packed " %1, %0, %0" : "+x"(r) : "m"(*reinterpret_cast<const __m256i*>(&g.b[i])));  \
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(&out[i]), r);                             \
      }                                                                                          \
    }                                                                                            \
    [[gnu::target("avx512f")]] static void Avx512(const Group& g, Lanes& out) {                  \
      __m512i r = _mm512_loadu_si512(g.a.data());                                                \
      asm(#packed " %1, %0, %0" : "+v"(r) : "m"(*reinterpret_cast<const __m512i*>(g.b.data()))); \
      _mm512_storeu_si512(out.data(), r);                                                        \
    }                                                                                            \
  }

BALLAST_BINARY(Add, "vaddss", vaddps);
BALLAST_BINARY(Subtract, "vsubss", vsubps);
BALLAST_BINARY(Multiply, "vmulss", vmulps);
BALLAST_BINARY(Divide, "vdivss", vdivps);
BALLAST_BINARY(Minimum, "vminss", vminps);
BALLAST_BINARY(Maximum, "vmaxss", vmaxps);
#undef BALLAST_BINARY

// wide: the 512-bit name, where AVX-512 renamed the instruction; the tails: an immediate operand.
#define BALLAST_UNARY(Name, narrow, narrow_tail, wide, wide_tail)                        \
  struct Name {                                                                          \
    static constexpr const char* kName = wide " " wide_tail;                             \
    static uint32_t Scalar(uint32_t a, uint32_t, uint32_t) {                             \
      const __m128i x = _mm_cvtsi32_si128(static_cast<int>(a));                          \
      __m128i r;                                                                         \
      asm(narrow " " narrow_tail "%1, %0" : "=x"(r) : "x"(x));                           \
      return static_cast<uint32_t>(_mm_cvtsi128_si32(r));                                \
    }                                                                                    \
    [[gnu::target("avx2")]] static void Avx2(const Group& g, Lanes& out) {               \
      for (int i = 0; i < kLanes; i += 8) {                                              \
        const __m256i x = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&g.a[i])); \
        __m256i r;                                                                       \
        asm(narrow " " narrow_tail "%1, %0" : "=x"(r) : "x"(x));                         \
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(&out[i]), r);                     \
      }                                                                                  \
    }                                                                                    \
    [[gnu::target("avx512f")]] static void Avx512(const Group& g, Lanes& out) {          \
      const __m512i x = _mm512_loadu_si512(g.a.data());                                  \
      __m512i r;                                                                         \
      asm(wide " " wide_tail "%1, %0" : "=v"(r) : "v"(x));                               \
      _mm512_storeu_si512(out.data(), r);                                                \
    }                                                                                    \
  }

BALLAST_UNARY(SquareRoot, "vsqrtps", "", "vsqrtps", "");
BALLAST_UNARY(RoundNearest, "vroundps", "$8, ", "vrndscaleps", "$8, ");
BALLAST_UNARY(RoundDown, "vroundps", "$9, ", "vrndscaleps", "$9, ");
BALLAST_UNARY(ToInteger, "vcvtps2dq", "", "vcvtps2dq", "");
BALLAST_UNARY(ToIntegerTruncated, "vcvttps2dq", "", "vcvttps2dq", "");
BALLAST_UNARY(FromInteger, "vcvtdq2ps", "", "vcvtdq2ps", "");
#undef BALLAST_UNARY

// r = a * b + c, with the sign changes of the instruction's name.
#define BALLAST_FUSED(Name, scalar, packed)                                                                 \
  struct Name {                                                                                             \
    static constexpr const char* kName = #packed;                                                           \
    static uint32_t Scalar(uint32_t a, uint32_t b, uint32_t c) {                                            \
      __m128i r = _mm_cvtsi32_si128(static_cast<int>(a));                                                   \
      const __m128i y = _mm_cvtsi32_si128(static_cast<int>(b)), z = _mm_cvtsi32_si128(static_cast<int>(c)); \
      asm(scalar " %2, %1, %0" : "+x"(r) : "x"(y), "x"(z));                                                 \
      return static_cast<uint32_t>(_mm_cvtsi128_si32(r));                                                   \
    }                                                                                                       \
    [[gnu::target("avx2,fma")]] static void Avx2(const Group& g, Lanes& out) {                              \
      for (int i = 0; i < kLanes; i += 8) {                                                                 \
        __m256i r = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&g.a[i]));                          \
        const __m256i y = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&g.b[i]));                    \
        const __m256i z = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(&g.c[i]));                    \
        asm(#packed " %2, %1, %0" : "+x"(r) : "x"(y), "x"(z));                                              \
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(&out[i]), r);                                        \
      }                                                                                                     \
    }                                                                                                       \
    [[gnu::target("avx512f")]] static void Avx512(const Group& g, Lanes& out) {                             \
      __m512i r = _mm512_loadu_si512(g.a.data());                                                           \
      const __m512i y = _mm512_loadu_si512(g.b.data()), z = _mm512_loadu_si512(g.c.data());                 \
      asm(#packed " %2, %1, %0" : "+v"(r) : "v"(y), "v"(z));                                                \
      _mm512_storeu_si512(out.data(), r);                                                                   \
    }                                                                                                       \
  }

BALLAST_FUSED(MultiplyAdd, "vfmadd213ss", vfmadd213ps);
BALLAST_FUSED(NegatedMultiplyAdd, "vfnmadd231ss", vfnmadd231ps);
#undef BALLAST_FUSED

// To half precision and back.
struct HalfRoundTrip {
  static constexpr const char* kName = "vcvtps2ph";
  [[gnu::target("f16c")]] static uint32_t Scalar(uint32_t a, uint32_t, uint32_t) {
    const __m128 x = _mm_castsi128_ps(_mm_cvtsi32_si128(static_cast<int>(a)));
    return static_cast<uint32_t>(_mm_cvtsi128_si32(_mm_castps_si128(_mm_cvtph_ps(_mm_cvtps_ph(x, 0)))));
  }
  [[gnu::target("avx2,f16c")]] static void Avx2(const Group& g, Lanes& out) {
    for (int i = 0; i < kLanes; i += 8) {
      const __m256 x = _mm256_loadu_ps(reinterpret_cast<const float*>(&g.a[i]));
      _mm256_storeu_ps(reinterpret_cast<float*>(&out[i]), _mm256_cvtph_ps(_mm256_cvtps_ph(x, 0)));
    }
  }
  [[gnu::target("avx512f")]] static void Avx512(const Group& g, Lanes& out) {
    const __m512 x = _mm512_loadu_ps(g.a.data());
    _mm512_storeu_ps(out.data(), _mm512_cvtph_ps(_mm512_cvtps_ph(x, 0)));
  }
};

// Integer moves that AVX2 lacks: only plain code and AVX-512 are compared.
struct NarrowToByte {
  static constexpr const char* kName = "vpmovdb";
  static void Plain(const Group& g, Lanes& out) {
    out = {};
    for (int i = 0; i < kLanes; ++i) out[i / 4] |= (g.a[i] & 0xff) << (i % 4 * 8);
  }
  [[gnu::target("avx512f")]] static void Avx512(const Group& g, Lanes& out) {
    out = {};
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.data()), _mm512_cvtepi32_epi8(_mm512_loadu_si512(g.a.data())));
  }
};

struct PermuteTwo {
  static constexpr const char* kName = "vpermt2ps";
  static void Plain(const Group& g, Lanes& out) {
    for (int i = 0; i < kLanes; ++i) out[i] = g.c[i] & 16 ? g.b[g.c[i] & 15] : g.a[g.c[i] & 15];
  }
  [[gnu::target("avx512f")]] static void Avx512(const Group& g, Lanes& out) {
    _mm512_storeu_ps(out.data(), _mm512_permutex2var_ps(_mm512_loadu_ps(g.a.data()), _mm512_loadu_si512(g.c.data()),
                                                        _mm512_loadu_ps(g.b.data())));
  }
};

struct MaskedShift {
  static constexpr const char* kName = "vpsrlvd{k}{z}";
  static void Plain(const Group& g, Lanes& out) {
    for (int i = 0; i < kLanes; ++i) out[i] = g.a[i] > g.b[i] ? g.a[i] >> (g.c[i] & 31) : 0;
  }
  [[gnu::target("avx512f")]] static void Avx512(const Group& g, Lanes& out) {
    const __m512i a = _mm512_loadu_si512(g.a.data());
    const __m512i count = _mm512_and_si512(_mm512_loadu_si512(g.c.data()), _mm512_set1_epi32(31));
    const __mmask16 greater = _mm512_cmpgt_epu32_mask(a, _mm512_loadu_si512(g.b.data()));
    _mm512_storeu_si512(out.data(), _mm512_maskz_srlv_epi32(greater, a, count));
  }
};

uint64_t Digest(uint64_t digest, const Lanes& lanes) {
  for (const uint32_t bits : lanes) digest = (digest ^ bits) * 0x100000001b3u;
  return digest;
}

int Differing(const Lanes& left, const Lanes& right) {
  int count = 0;
  for (int i = 0; i < kLanes; ++i) count += left[i] != right[i];
  return count;
}

// Prints the first lane that differs.
void ShowFirst(const char* what, const Group& g, const Lanes& expected, const Lanes& got) {
  for (int i = 0; i < kLanes; ++i) {
    if (expected[i] == got[i]) continue;
    std::printf("  %s: %08x %08x %08x gives %08x, expected %08x\n", what, g.a[i], g.b[i], g.c[i], got[i], expected[i]);
    return;
  }
}

template <typename Operation>
int Check(std::span<const Group> groups) {
  int avx2_wrong = 0, avx512_wrong = 0;
  uint64_t digest = 0xcbf29ce484222325u;
  for (const Group& group : groups) {
    Lanes expected, got;
    if constexpr (requires { Operation::Plain(group, expected); }) {
      Operation::Plain(group, expected);
    } else {
      for (int i = 0; i < kLanes; ++i) expected[i] = Operation::Scalar(group.a[i], group.b[i], group.c[i]);
      Operation::Avx2(group, got);
      if (avx2_wrong == 0) ShowFirst("avx2", group, expected, got);
      avx2_wrong += Differing(expected, got);
    }
    digest = Digest(digest, expected);
    if (!HasAvx512()) continue;
    Operation::Avx512(group, got);
    if (avx512_wrong == 0) ShowFirst("avx512", group, expected, got);
    avx512_wrong += Differing(expected, got);
  }
  std::printf("%-16s digest %016llx, differing: avx2 %d, avx512 %d\n", Operation::kName,
              static_cast<unsigned long long>(digest), avx2_wrong, avx512_wrong);
  return avx2_wrong + avx512_wrong;
}

template <typename... Operations>
int CheckAll(std::span<const Group> groups) {
  return (Check<Operations>(groups) + ...);
}

[[gnu::target("avx512f")]] int Speed(long count) {
  alignas(64) static std::array<float, 1024> numbers;
  numbers.fill(1.25f);
  const __m512 scale = _mm512_set1_ps(1.5f), shift = _mm512_set1_ps(0.25f);
  for (long i = 0; i < count; ++i) {
    float* at = &numbers[static_cast<size_t>(i * kLanes % 1024)];
    _mm512_store_ps(at, _mm512_fmadd_ps(_mm512_div_ps(_mm512_load_ps(at), scale), scale, shift));
  }
  std::printf("%ld of 16 lanes, %g\n", count, static_cast<double>(numbers[0]));
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc == 3 && std::strcmp(argv[1], "speed") == 0) return Speed(std::atol(argv[2]));
  std::printf("AVX-512 F BW VL DQ: %s\n", HasAvx512() ? "yes" : "no, only scalar and AVX2 are compared");
  const std::vector<Group> groups = MakeGroups();
  const int wrong = CheckAll<Add, Subtract, Multiply, Divide, Minimum, Maximum, SquareRoot, RoundNearest, RoundDown,
                             ToInteger, ToIntegerTruncated, FromInteger, MultiplyAdd, NegatedMultiplyAdd, HalfRoundTrip,
                             NarrowToByte, PermuteTwo, MaskedShift>(groups);
  std::printf("%zu groups of 16, %d results differ\n", groups.size(), wrong);
  return wrong == 0 ? 0 : 1;
}
