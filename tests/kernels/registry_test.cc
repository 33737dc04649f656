// The registry: names, planes, hyperparameters and the constants made of them.
#include <gtest/gtest.h>

#include <algorithm>
#include <limits>
#include <map>
#include <set>

#include "tests/kernels/decoded.h"

namespace ballast::kernels {
namespace {

TEST(RegistryTest, NamesAreUniqueAndFound) {
  std::set<std::string> names;
  for (const Kernel& kernel : Kernels()) {
    EXPECT_TRUE(names.insert(NameOf(kernel)).second) << NameOf(kernel);
    EXPECT_EQ(FindKernel(kernel.rule, kernel.master, kernel.state), &kernel);
    EXPECT_NE(FindMasterFormat(kernel.master), nullptr);
    std::set<std::string> planes, hypers;
    for (const Plane& p : kernel.planes) EXPECT_TRUE(planes.insert(p.name).second) << p.name;
    for (const Hyper& h : kernel.hypers) EXPECT_TRUE(hypers.insert(h.name).second) << h.name;
    EXPECT_LE(kernel.planes.size(), static_cast<size_t>(kMaxPlanes));
  }
  for (const MasterFormat& master : MasterFormats()) EXPECT_EQ(FindMasterFormat(master.name), &master);
  for (const MomentFormat& state : MomentFormats()) EXPECT_EQ(FindMomentFormat(state.name), &state);
  EXPECT_EQ(FindKernel("adamw", "split24", "nothing"), nullptr);
  EXPECT_EQ(FindMasterFormat(""), nullptr);
  EXPECT_EQ(FindMomentFormat("int4"), nullptr);
  EXPECT_EQ(FindWireFormat("fp12"), -1);
}

TEST(RegistryTest, AMastersPlanesComeFirstInItsKernels) {
  for (const Kernel& kernel : Kernels()) {
    const MasterFormat& master = *FindMasterFormat(kernel.master);
    for (size_t p = 0; p < master.planes.size(); ++p) {
      EXPECT_STREQ(kernel.planes[p].name, master.planes[p].name);
      EXPECT_EQ(kernel.planes[p].kind, PlaneKind::kWeights);
      EXPECT_EQ(kernel.planes[p].bytes, master.planes[p].bytes);
      EXPECT_EQ(kernel.planes[p].per, master.planes[p].per);
    }
  }
}

// A state's moments are stored in a kernel as the codec alone stores them.
TEST(RegistryTest, AKernelsMomentPlanesAreItsStates) {
  for (const Kernel& kernel : Kernels()) {
    const MomentFormat& state = *FindMomentFormat(kernel.state);
    for (const PlaneKind kind : {PlaneKind::kMomentum, PlaneKind::kVariance}) {
      const size_t first = MomentPlane(kernel, kind);
      if (first == kMaxPlanes) continue;
      const std::span<const Plane> planes = (kind == PlaneKind::kMomentum ? state.momentum : state.variance).planes;
      for (size_t p = 0; p < planes.size(); ++p) {
        ASSERT_LT(first + p, kernel.planes.size()) << NameOf(kernel);
        EXPECT_EQ(kernel.planes[first + p].bytes, planes[p].bytes) << NameOf(kernel);
        EXPECT_EQ(kernel.planes[first + p].per, planes[p].per) << NameOf(kernel);
        EXPECT_EQ(kernel.planes[first + p].kind, kind) << NameOf(kernel);
      }
    }
  }
}

// What a rule has, its ranges, and the tensor's scale that each takes.
struct Range {
  double min, max;
  bool open_min, open_max;
  ScaledBy scaled_by;
};
const std::map<std::string, Range> kRanges = {{"lr", {0, 1e6, false, false, ScaledBy::kLrScale}},
                                              {"lr_peak", {0, 1e6, false, false, ScaledBy::kLrScale}},
                                              {"weight_decay", {0, 1e6, false, false, ScaledBy::kWdScale}},
                                              {"beta1", {0, 1, false, true, ScaledBy::kNothing}},
                                              {"beta2", {0, 1, false, true, ScaledBy::kNothing}},
                                              {"eps", {0, 1e6, true, false, ScaledBy::kNothing}},
                                              {"momentum", {0, 1, false, true, ScaledBy::kNothing}},
                                              {"dampening", {0, 1, false, false, ScaledBy::kNothing}},
                                              {"nesterov", {0, 1, false, false, ScaledBy::kNothing}},
                                              {"match_rms", {0, 1, false, false, ScaledBy::kNothing}}};

TEST(RegistryTest, BadHyperparametersLieOutsideTheRanges) {
  for (const Kernel& kernel : Kernels()) {
    for (const Hyper& h : kernel.hypers) {
      SCOPED_TRACE(std::string(kernel.rule) + " " + h.name);
      ASSERT_TRUE(kRanges.contains(h.name));
      const Range& range = kRanges.at(h.name);
      EXPECT_EQ(h.min, range.min);
      EXPECT_EQ(h.max, range.max);
      EXPECT_EQ(h.open_min, range.open_min);
      EXPECT_EQ(h.open_max, range.open_max);
      EXPECT_EQ(h.scaled_by, range.scaled_by);
    }
  }
}

const std::map<std::string, std::set<std::string>> kHypersOfRule = {
    {"adam", {"lr", "weight_decay", "beta1", "beta2", "eps"}},
    {"adamw", {"lr", "weight_decay", "beta1", "beta2", "eps", "lr_peak"}},
    {"stable_adamw", {"lr", "weight_decay", "beta1", "beta2", "eps", "lr_peak"}},
    {"sgd", {"lr", "weight_decay", "momentum", "dampening", "nesterov"}},
    {"sgdw", {"lr", "weight_decay", "momentum", "dampening", "nesterov", "lr_peak"}},
    {"lion", {"lr", "weight_decay", "beta1", "beta2", "lr_peak"}},
    {"muon", {"lr", "weight_decay", "momentum", "nesterov", "match_rms", "eps", "lr_peak"}},
    {"collage_light", {"lr", "weight_decay", "beta1", "beta2", "eps"}},
    {"collage_plus", {"lr", "weight_decay", "beta1", "beta2", "eps"}}};

TEST(RegistryTest, RulesHaveTheirHyperparametersAndNoOther) {
  std::set<std::string> seen;
  for (const Kernel& kernel : Kernels()) {
    EXPECT_EQ(kernel.has_rms, MomentPlane(kernel, PlaneKind::kVariance) != kMaxPlanes) << kernel.rule;
    EXPECT_EQ(kernel.finish != nullptr || kernel.fit != nullptr, kernel.measure != nullptr);
    const auto wanted = kHypersOfRule.find(kernel.rule);
    if (wanted == kHypersOfRule.end()) continue;
    std::set<std::string> names;
    for (const Hyper& h : kernel.hypers) names.insert(h.name);
    EXPECT_EQ(names, wanted->second) << kernel.rule;
    EXPECT_EQ(kernel.finish != nullptr, wanted->first == "stable_adamw");
    EXPECT_EQ(kernel.fit != nullptr, wanted->first == "muon");
    seen.insert(wanted->first);
  }
  EXPECT_EQ(seen.size(), kHypersOfRule.size());
}

TEST(RegistryTest, DefaultHyperparametersAreInRange) {
  for (const Kernel& kernel : Kernels()) {
    for (const Hyper& h : kernel.hypers) {
      EXPECT_TRUE(h.open_min ? h.value > h.min : h.value >= h.min) << h.name;
      EXPECT_TRUE(h.open_max ? h.value < h.max : h.value <= h.max) << h.name;
      EXPECT_GT(std::string(h.doc).size(), 4u) << h.name;
    }
  }
}

// Relative error of a constant: RN to fp32 is 2^-24; the rest allows for double's cancellation in 1 - b^t.
TEST(RegistryTest, AdamWConstantsAgreeWithLongDouble) {
  const Kernel& kernel = *FindKernel("adamw", "fp32", "fp32");
  for (const long double b2 : {0.0L, 0.9L, 0.999L, 0.9999L}) {
    for (const uint64_t t : {1ull, 2ull, 7ull, 100ull, 12345ull, 100000000ull}) {
      std::vector<double> hyper = DefaultHypers(kernel);
      std::vector<long double> h(5);
      for (size_t i = 0; i < 5; ++i) {
        if (kernel.hypers[i].name == std::string_view("beta2")) hyper[i] = static_cast<double>(b2);
        h[i] = static_cast<long double>(hyper[i]);
      }
      const auto of = [&](std::string_view name) {
        for (size_t i = 0; i < 5; ++i) {
          if (kernel.hypers[i].name == name) return h[i];
        }
        return std::numeric_limits<long double>::quiet_NaN();
      };
      const long double bias1 = 1 - std::pow(of("beta1"), static_cast<long double>(t));
      const long double bias2 = 1 - std::pow(of("beta2"), static_cast<long double>(t));
      const long double decay = of("lr") * of("weight_decay"), eps = of("eps");
      const long double wanted[] = {of("beta1"), 1 - of("beta1"),   of("beta2"), 1 - of("beta2"), 1 / std::sqrt(bias2),
                                    eps,         -of("lr") / bias1, -decay};
      float got[kMaxConstants] = {};
      kernel.prepare(hyper, t, got);
      for (const long double exact : wanted) {
        const bool there = std::any_of(std::begin(got), std::end(got), [exact](float x) {
          return std::abs(static_cast<long double>(x) - exact) <= std::abs(exact) * 0x1.01p-24L;
        });
        EXPECT_TRUE(there) << static_cast<double>(exact) << " t " << t;
      }
    }
  }
}

}  // namespace
}  // namespace ballast::kernels
