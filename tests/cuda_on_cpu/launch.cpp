// launch.cpp: what device.py calls.
#include <algorithm>
#include <csignal>
#include <cstring>
#include <numeric>

#include "memory.h"

namespace cuda_on_cpu {

// As device.py's _Launch.
struct LaunchRequest {
  const Kernel* kernel;
  const unsigned char* parameters;  // packed as for the driver
  const Array* arrays;
  uint64_t num_arrays;
  uint64_t shared_bytes;
  uint64_t seed;
  uint32_t grid[3];
  uint32_t order;         // of enum Order
  uint32_t early_copies;  // 0 or 1
};

// ---- Faults: in mode fast nothing stands between a wild pointer and the CPU ----------------------------------------
static void on_fault(int signal_number, siginfo_t* info, void* context) {
  if (current == nullptr) {  // not a kernel's
    signal(signal_number, SIG_DFL);
    return;  // to the instruction, which faults again
  }
  const void* pc = nullptr;
#if defined(__x86_64__)
  pc = reinterpret_cast<const void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP] + 1);
#elif defined(__aarch64__)
  pc = reinterpret_cast<const void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc + 1);
#endif
  const std::string line = pc != nullptr ? line_of(pc) + ": " : "";
  if (signal_number == SIGFPE) fail(line + "integer division by zero");
  if (info->si_code == SI_KERNEL) fail(line + "illegal access to no address of this machine");
  fail(line + "illegal access to " + describe_place(reinterpret_cast<uintptr_t>(info->si_addr)));
}

static constexpr int FAULTS[] = {SIGSEGV, SIGBUS, SIGFPE};

// Takes faults while it lives. A kernel's handler runs on a stack of its own and leaves it by switching fibers.
class FaultsTaken {
 public:
  FaultsTaken() {
    static char stack[64 << 10];
    stack_t ours = {};
    ours.ss_sp = stack;
    ours.ss_size = sizeof stack;
    sigaltstack(&ours, &stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER;
    for (int i = 0; i < 3; i++) sigaction(FAULTS[i], &action, &actions_[i]);
  }
  ~FaultsTaken() {
    for (int i = 0; i < 3; i++) sigaction(FAULTS[i], &actions_[i], nullptr);
    sigaltstack(&stack_, nullptr);
  }

 private:
  stack_t stack_;
  struct sigaction actions_[3];
};

// ---- A launch -------------------------------------------------------------------------------------------------------
// The order of the launch's blocks: as of threads.
static std::vector<unsigned> order_of_blocks(Order order, unsigned number, uint64_t seed) {
  std::vector<unsigned> blocks(number);
  std::iota(blocks.begin(), blocks.end(), 0u);
  uint64_t random = (seed + 1) * 0x9e3779b97f4a7c15;
  for (unsigned left = number; left > 1 && order != Order::FORWARD; left--) {
    random = random * 6364136223846793005 + 1442695040888963407;
    if (order == Order::RANDOM) std::swap(blocks[left - 1], blocks[(random >> 33) % left]);
  }
  if (order == Order::REVERSE) std::reverse(blocks.begin(), blocks.end());
  return blocks;
}

// Point the parameters to where the arrays are during the launch.
static std::vector<unsigned char> place_parameters(const Kernel& kernel, const unsigned char* packed) {
  std::vector<unsigned char> parameters(packed, packed + kernel.parameter_bytes);
  size_t offset = 0;
  for (unsigned i = 0; i < kernel.num_parameters; i++) {
    const char code = kernel.parameters[i].code;
    const size_t size = code == 'P' || code == 'q' ? 8 : 4;
    offset = (offset + size - 1) / size * size;
    if (code == 'P') {
      void* data;
      memcpy(&data, &parameters[offset], sizeof data);
      if (data != nullptr) data = place_of(data);
      memcpy(&parameters[offset], &data, sizeof data);
    }
    offset += size;
  }
  return parameters;
}

// Null, or what went wrong; good until the next launch.
EXPORT const char* launch(const LaunchRequest* request) {
  const Kernel& kernel = *request->kernel;
  const uint32_t* grid = request->grid;
  block.launch = {kernel.name, {grid[0], grid[1], grid[2]}, kernel.threads, request->shared_bytes};
  block.order = static_cast<Order>(request->order);
  block.early_copies = request->early_copies != 0;
  block.error.clear();
  const FaultsTaken faults_taken;
  if (Observer* watching = observer()) watching->begin_launch(block.launch);
  begin_memory(request->arrays, request->num_arrays);
  set_dynamic_shared(request->shared_bytes);
  const std::vector<unsigned char> parameters = place_parameters(kernel, request->parameters);
  for (unsigned index : order_of_blocks(block.order, grid[0] * grid[1] * grid[2], request->seed)) {
    run_block(index, kernel, parameters.data(), request->seed);
    if (!block.error.empty()) break;
  }
  end_memory();
  if (Observer* watching = observer()) watching->end_launch();
  return block.error.empty() ? nullptr : block.error.c_str();
}

}  // namespace cuda_on_cpu
