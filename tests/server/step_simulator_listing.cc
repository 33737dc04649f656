// Events and effects as words, in the manner of the scenarios.
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"

#include "tests/server/step_simulator.h"

namespace ballast::sim {
namespace {

uint64_t Id(SessionId session) { return static_cast<uint64_t>(session); }

std::string Text(uint32_t micro, uint32_t tensor, uint64_t chunk) {
  return absl::StrCat(" micro=", micro, " tensor=", tensor, " chunk=", chunk);
}

std::string Text(const ChunkId& id) { return Text(id.micro, id.tensor, id.chunk); }

std::string Text(const Slab& slab) { return absl::StrCat(" slab=", slab.offset, "+", slab.bytes); }

struct Describer {
  std::string operator()(const event::Attach& e) const {
    return absl::StrCat("attach s=", Id(e.session), e.resumes ? absl::StrCat(" resumes=", Id(*e.resumes)) : "",
                        " rank=", e.rank, " world=", e.world, e.takeover ? " takeover" : "");
  }
  std::string operator()(const event::StreamOpened& e) const {
    return absl::StrCat("open s=", Id(e.session), " step=", e.weights_step,
                        " have=", absl::StrJoin(e.weights_received, ""));
  }
  std::string operator()(const event::StreamClosed& e) const {
    return absl::StrCat(e.clean ? "leave" : "lost", " s=", Id(e.session));
  }
  std::string operator()(const event::StepBegin& e) const {
    return absl::StrCat("begin s=", Id(e.session), " step=", e.step, " content=", e.content);
  }
  std::string operator()(const event::MicroBegin& e) const {
    return absl::StrCat("micro-begin s=", Id(e.session), " micro=", e.micro, e.last ? " last" : "");
  }
  std::string operator()(const event::Chunk& e) const {
    return absl::StrCat("chunk s=", Id(e.session), Text(e.micro, e.tensor, e.chunk), " crc=", e.crc);
  }
  std::string operator()(const event::MicroEnd& e) const {
    return absl::StrCat("micro-end s=", Id(e.session), " micro=", e.micro, " absent=", absl::StrJoin(e.absent, ""));
  }
  std::string operator()(const event::StepEnd& e) const { return absl::StrCat("step-end s=", Id(e.session)); }
  std::string operator()(const event::TensorApplied& e) const {
    return absl::StrCat("applied step=", e.step, " tensor=", e.tensor, Text(e.slab));
  }
  std::string operator()(const event::Verdict& e) const {
    return absl::StrCat("verdict step=", e.step, e.apply ? " apply" : " skip");
  }
  std::string operator()(const event::Tick&) const { return "tick"; }

  std::string operator()(const effect::Reject& e) const { return absl::StrCat("reject ", e.status.ToString()); }
  std::string operator()(const effect::Attached& e) const {
    return absl::StrCat("attached rank=", e.rank, " s=", Id(e.session), e.resumed ? " resumed" : "");
  }
  std::string operator()(const effect::Fence& e) const {
    return absl::StrCat("fence rank=", e.rank, " s=", Id(e.session), " ", e.status.ToString());
  }
  std::string operator()(const effect::Opened& e) const { return absl::StrCat("opened step=", e.step); }
  std::string operator()(const effect::Begun& e) const { return absl::StrCat("begun rank=", e.rank); }
  std::string operator()(const effect::Hold& e) const { return absl::StrCat("hold rank=", e.rank, Text(e.id)); }
  std::string operator()(const effect::Drop& e) const {
    return absl::StrCat("drop rank=", e.rank, e.again ? " again" : "");
  }
  std::string operator()(const effect::Sum& e) const {
    return absl::StrCat("sum", Text(e.id), " ranks=", absl::StrJoin(e.ranks, ","), Text(e.slab),
                        e.first ? " first" : "");
  }
  std::string operator()(const effect::Forget& e) const { return absl::StrCat("forget rank=", e.rank); }
  std::string operator()(const effect::Update& e) const {
    return absl::StrCat("update step=", e.step, " tensor=", e.tensor, Text(e.slab));
  }
  std::string operator()(const effect::Judge& e) const { return absl::StrCat("judge step=", e.step); }
  std::string operator()(const effect::Publish& e) const {
    return absl::StrCat("publish step=", e.step, " tensor=", e.tensor, e.rank ? absl::StrCat(" rank=", *e.rank) : "");
  }
  std::string operator()(const effect::Close& e) const {
    return absl::StrCat("close step=", e.step, " ", OutcomeName(e.outcome), " ", e.reason,
                        " not_applied=", absl::StrJoin(e.not_applied, ","));
  }
  std::string operator()(const effect::Result& e) const {
    return absl::StrCat("result step=", e.step, " rank=", e.rank);
  }
  std::string operator()(const effect::Discard& e) const { return absl::StrCat("discard step=", e.step); }
};

}  // namespace

std::string Describe(const StepEvent& event) { return std::visit(Describer{}, event); }
std::string Describe(const StepEffect& effect) { return std::visit(Describer{}, effect); }

}  // namespace ballast::sim
