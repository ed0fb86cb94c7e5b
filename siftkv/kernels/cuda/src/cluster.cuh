// Blocks of a cluster: where a neighbour has what stands at an address here, and what is sent to it.
DEV int cluster_rank() { u32 x; asm("mov.u32 %0, %cluster_ctarank;" : "=r"(x)); return static_cast<int>(x); }
DEV u32 address_in(int block, u32 address) {
  u32 there;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
  return there;
}
// Arrives at the barrier there with its 16 bytes.
DEV void send(u32 address, const float (&x)[4], u32 barrier) {
  asm volatile("st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1,%2,%3,%4}, [%5];" ::"r"(address), "f"(x[0]), "f"(x[1]), "f"(x[2]),
               "f"(x[3]), "r"(barrier) : "memory");
}
DEV void arrive_there(u32 barrier) { asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory"); }
// One lane of the warp, the compiler knowing that it is one.
DEV bool elect() {
  u32 chosen;
  asm volatile("{.reg .pred p; elect.sync _|p, 0xffffffff; selp.u32 %0, 1, 0, p;}" : "=r"(chosen));
  return chosen;
}
DEV void barriers_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
// They meet, no more: what one sends may still be under way.
DEV void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
DEV void cluster_wait() { asm volatile("barrier.cluster.wait.aligned;" ::: "memory"); }
// No block ends before all that its neighbours have sent has come: what reaches a block that has ended is a launch failure.
DEV void cluster_leave() {
  asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
  cluster_wait();
}
