// The edge never lets through what the inside counts on: any bytes are read as a trainer's message or a run's
// description, as they stand or as the fields of one that is nearly right, and what is accepted is of the run, whole,
// in bounds, and finite. What is refused says why.
//
// A libFuzzer target (LLVMFuzzerTestOneInput); random_inputs.cc drives it where there is no clang.
#include <google/protobuf/stubs/logging.h>

#include <cmath>

#include "proto/bitmap.h"
#include "proto/checksum.h"

#include "server/convert/convert.h"
#include "tests/fuzz/input.h"
#include "tests/fuzz/require.h"

namespace ballast::fuzz {
namespace {

Config::Limits SmallLimits() {
  Config::Limits limits;
  limits.chunk_bytes = 16384;
  return limits;
}

v1::RunSpec SmallSpec() {
  v1::RunSpec spec;
  spec.set_run_id("r");
  for (const int64_t elements : {1, 4096, 10000}) {
    v1::TensorSpec* tensor = spec.add_tensors();
    tensor->set_name("w" + std::to_string(elements));
    tensor->add_shape(elements);
    tensor->set_dtype(elements == 1 ? "bf16" : "fp32");
    tensor->set_group(elements == 1 ? 1 : 0);
  }
  spec.add_groups()->set_rule("adamw");
  spec.add_groups()->set_rule("sgd");
  spec.set_accumulation(4);
  spec.set_ranks(2);
  return spec;
}

const RunSpec& Run() {
  static const RunSpec spec = ToRunSpec(SmallSpec(), SmallLimits()).value();
  return spec;
}

absl::Span<const std::byte> Bytes(const std::string& s) {
  return {reinterpret_cast<const std::byte*>(s.data()), s.size()};
}

uint64_t ElementsOf(uint32_t tensor, uint64_t chunk) {
  return ChunkEnd(Run(), Run().tensors[tensor], chunk) - ChunkBegin(Run(), chunk);
}

// --- what each message must be, once it is accepted ---

void Check(const v1::Gradient& g) {
  absl::string_view reason;
  if (auto s = CheckGradient(g, g.data().size(), Run(), &reason); !s.ok()) {
    RequireSaid(s);
    return Require(!reason.empty(), "the refusal has no reason for the metrics");
  }
  Require(g.tensor() < Run().tensors.size(), "the tensor is not of the run");
  Require(g.chunk() < ChunkCount(Run(), Run().tensors[g.tensor()]), "the chunk is not of the tensor");
  const auto format = Run().tensors[g.tensor()].gradient_format;
  Require(g.format() == kernels::WireFormats()[static_cast<size_t>(format)].name, "the format is another");
  const uint64_t most = ElementsOf(g.tensor(), g.chunk()) * WireBytes(format);  // a rank may have part of the chunk
  Require(!g.data().empty() && g.data().size() <= most, "the payload does not fit the chunk");
  Require(g.data().size() % WireBytes(format) == 0, "the payload is of no whole elements");
  Require(g.scale() == 0 || g.scale() == 1, "its scale would be ignored");
}

void Check(const v1::SmallGradients& small) {
  if (auto s = CheckSmallGradients(small); !s.ok()) return RequireSaid(s);
  Require(small.tensors_size() > 0 && small.sizes_size() == small.tensors_size(), "a tensor has no size");
  Require(small.crc32c_size() == small.tensors_size(), "a tensor has no checksum");
  uint64_t bytes = 0;
  for (int i = 0; i < small.tensors_size(); ++i) {
    bytes += small.sizes(i);
    absl::string_view reason;
    const uint32_t tensor = small.tensors(i);
    if (auto s = CheckSmallGradient(tensor, small.sizes(i), Run(), &reason); !s.ok()) {
      RequireSaid(s);
      Require(!reason.empty(), "the refusal has no reason for the metrics");
      continue;
    }
    Require(tensor < Run().tensors.size(), "the tensor is not of the run");
    const size_t width = WireBytes(Run().tensors[tensor].gradient_format);
    Require(small.sizes(i) <= ElementsOf(tensor, 0) * width && small.sizes(i) % width == 0,
            "it does not fit the chunk");
  }
  Require(bytes == small.data().size(), "the data is not what the sizes say");
}

void Check(const v1::StepBegin& begin) {
  const auto made = ToStepBegin(begin, Run());
  if (!made.ok()) return RequireSaid(made.status());
  Require(made->step == begin.step(), "the step is another");
  Require(made->loss_scale > 0 && std::isfinite(made->loss_scale), "the loss scale cannot be divided by");
  Require(made->hyper.size() == Run().groups.size(), "a group has no values");
  for (size_t i = 0; i < made->hyper.size(); ++i) {
    const auto hypers = Run().groups[i].kernel->hypers;
    Require(made->hyper[i].size() == hypers.size(), "a hyperparameter is missing");
    for (size_t h = 0; h < hypers.size(); ++h) {
      const double value = made->hyper[i][h];
      Require(value >= hypers[h].min && value <= hypers[h].max, "a hyperparameter is out of bounds");
    }
  }
}

void Check(const v1::MicroEnd& end) {
  const auto made = ToMicroEnd(end, Run());
  if (!made.ok()) return RequireSaid(made.status());
  Require(made->micro == end.micro() && made->absent.size() == Run().tensors.size(), "tensors are not of the run");
  for (size_t i = 0; i < made->absent.size(); ++i) {
    const bool sent = i / 8 < end.absent().size() && (end.absent()[i / 8] >> i % 8 & 1) != 0;
    Require(made->absent[i] == sent, "another tensor is absent than was said");
  }
  Require(*ToBits(PackBits(made->absent), made->absent.size(), "absent") == made->absent, "bits do not survive");
}

void CheckLoaded(const LoadChunk& made, const v1::LoadStateRequest& sent) {
  Require(made.tensor == sent.tensor() && made.tensor < Run().tensors.size(), "the tensor is not of the run");
  Require(made.chunk == sent.chunk() && made.chunk < ChunkCount(Run(), Run().tensors[made.tensor]),
          "the chunk is not of the tensor");
  Require(made.data == sent.data(), "the payload is another");
  Require(made.updates.has_value() == (sent.slot() == "updates"), "updates are in their slot alone");
  if (made.updates) return;
  Require(kernels::WireFormats()[static_cast<size_t>(made.format)].gradient, "weights cannot come in this format");
  Require(made.data.size() == ElementsOf(made.tensor, made.chunk) * WireBytes(made.format), "the size is wrong");
  Require(Crc32c(Bytes(made.data)) == sent.crc32c(), "the checksum is wrong");
}

void Check(v1::LoadStateRequest request) {
  const v1::LoadStateRequest sent = request;
  const auto made = ToLoadChunks(&request, Run());
  if (!made.ok()) return RequireSaid(made.status());
  if (sent.batch().empty()) return CheckLoaded(made->front(), sent);
  Require(made->size() == static_cast<size_t>(sent.batch_size()), "a batch has another length");
  for (size_t i = 0; i < made->size(); ++i) CheckLoaded((*made)[i], sent.batch(static_cast<int>(i)));
}

void Check(const v1::RunSpec& spec) {
  const Config::Limits limits = SmallLimits();
  const auto made = ToRunSpec(spec, limits);
  if (!made.ok()) return RequireSaid(made.status());
  Require(!made->tensors.empty() && !made->groups.empty(), "there is nothing to train");
  Require(made->ranks >= 1 && made->accumulation >= 1, "no gradient would be complete");
  Require(made->chunk_elements > 0 && made->chunk_elements % 4096 == 0, "chunks are not of whole tiles");
  uint64_t elements = 0;
  for (const TensorSpec& tensor : made->tensors) {
    Require(tensor.elements > 0 && tensor.group < made->groups.size(), "a tensor is nothing, or of no group");
    Require(std::isfinite(tensor.lr_scale) && std::isfinite(tensor.wd_scale), "a factor is not finite");
    elements += tensor.elements;
  }
  const Plan plan = MakePlan(*made);
  Require(plan.parameters == elements && plan.bytes.total() >= elements, "the plan is smaller than its tensors");
}

void Check(const v1::TrainRequest& request) {
  if (request.has_gradient()) Check(request.gradient());
  if (request.has_small_gradients()) Check(request.small_gradients());
  if (request.has_step_begin()) Check(request.step_begin());
  if (request.has_micro_end()) Check(request.micro_end());
  if (request.has_open()) {
    const auto bits = ToBits(request.open().weights_received(), Run().tensors.size(), "Open.weights_received");
    if (!bits.ok()) RequireSaid(bits.status());
  }
}

// --- messages that are nearly right ---

v1::Gradient GradientFrom(Input* in) {
  v1::Gradient g;
  g.set_micro(in->Below(5));
  g.set_tensor(in->Below(4));
  g.set_chunk(in->Below(16) == 0 ? in->Take<uint64_t>() : in->Below(4));
  g.set_format(in->Below(4) == 0 ? "bf16" : "fp32");
  if (in->Below(8) == 0) g.set_scale(in->Take<float>());
  constexpr size_t kSizes[] = {2, 4, 16384, 7232, 0, 16383};
  g.set_data(std::string(kSizes[in->Below(6)], 'x'));
  return g;
}

v1::LoadStateRequest LoadFrom(Input* in) {
  const v1::Gradient g = GradientFrom(in);
  v1::LoadStateRequest request;
  request.set_tensor(g.tensor());
  request.set_chunk(g.chunk());
  request.set_format(g.format());
  request.set_data(g.data());
  request.set_crc32c(in->Below(8) == 0 ? in->Take<uint32_t>() : Crc32c(Bytes(g.data())));
  if (in->Below(8) == 0) request.set_slot(in->Below(2) == 0 ? "weights" : "m");
  return request;
}

double ValueFrom(Input* in) {
  constexpr double kValues[] = {0, 1, 1e-3, 0.9, 0.999, -1, 1e300, 5e-324};
  return in->Below(4) == 0 ? in->Take<double>() : kValues[in->Below(8)];
}

v1::StepBegin BeginFrom(Input* in) {
  v1::StepBegin begin;
  begin.set_step(in->Take<uint32_t>());
  if (in->Below(2) == 0) begin.set_loss_scale(ValueFrom(in));
  for (uint32_t i = in->Below(4); i > 0; --i) {
    v1::GroupStep* group = begin.add_groups();
    const uint8_t which = in->Take<uint8_t>();
    if (which & 1) group->set_lr(ValueFrom(in));
    if (which & 2) group->set_weight_decay(ValueFrom(in));
    if (which & 4) group->set_beta1(ValueFrom(in));
    if (which & 8) group->set_beta2(ValueFrom(in));
    if (which & 16) group->set_momentum(ValueFrom(in));
  }
  return begin;
}

v1::RunSpec SpecFrom(Input* in) {
  v1::RunSpec spec = SmallSpec();
  for (v1::GroupSpec& group : *spec.mutable_groups()) {
    const auto& kernel = kernels::Kernels()[in->Take<uint16_t>() % kernels::Kernels().size()];
    group.set_rule(kernel.rule);
    if (in->Below(4) != 0) group.set_master(kernel.master);
    if (in->Below(4) != 0) group.set_state(kernel.state);
    const auto& formats = kernels::WireFormats();
    if (in->Below(2) == 0)
      group.set_serving(std::string(formats[in->Below(static_cast<uint32_t>(formats.size()))].name));
    if (in->Below(2) == 0)
      group.set_gradient(std::string(formats[in->Below(static_cast<uint32_t>(formats.size()))].name));
    if (in->Below(4) == 0) group.set_lr_peak(ValueFrom(in));
    for (const auto& hyper : kernel.hypers) {
      if (in->Below(4) == 0) (*group.mutable_hyper())[std::string(hyper.name)] = ValueFrom(in);
    }
  }
  for (v1::TensorSpec& tensor : *spec.mutable_tensors()) {
    if (in->Below(4) == 0) tensor.add_shape(in->Take<int64_t>());
    if (in->Below(4) == 0) tensor.add_shape(in->Below(4));
    if (in->Below(8) == 0) tensor.set_lr_scale(ValueFrom(in));
    if (in->Below(8) == 0) tensor.set_group(in->Below(4));
  }
  spec.set_ranks(in->Below(70));
  spec.set_accumulation(in->Take<uint8_t>());
  if (in->Below(8) == 0) spec.set_max_grad_norm(ValueFrom(in));
  if (in->Below(8) == 0) spec.set_rank_timeout_s(ValueFrom(in));
  if (in->Below(8) == 0) spec.set_commit(static_cast<v1::CommitMode>(in->Below(4)));
  return spec;
}

void RunOne(Input in) {
  switch (in.Below(7)) {
    case 0:
      if (v1::TrainRequest request; request.ParseFromString(in.Rest())) Check(request);
      return;
    case 1:
      if (v1::LoadStateRequest request; request.ParseFromString(in.Rest())) Check(request);
      return;
    case 2:
      if (v1::RunSpec spec; spec.ParseFromString(in.Rest())) Check(spec);
      return;
    case 3:
      return Check(GradientFrom(&in));
    case 4:
      return Check(BeginFrom(&in));
    case 5:
      return Check(LoadFrom(&in));
    default:
      return Check(SpecFrom(&in));
  }
}

}  // namespace
}  // namespace ballast::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  // It says of every text that is no UTF-8 so.
  static auto* const said = google::protobuf::SetLogHandler(nullptr);
  static_cast<void>(said);
  ballast::fuzz::RunOne({data, size});
  return 0;
}
